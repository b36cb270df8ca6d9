// panel_gemm.h: the blocked product that every native GEMM of the cpu device is made of.
//
// sums[r, w] = sum over k of rows[r, k] * weights[w, k]: `weights` compressed rows of one format, decoded once into a
// panel that stays in cache, and used for all rows; for very few rows the decoder feeds the sums. Either way each sum
// is added up in the one order that kernels.h gives for the instruction set and the precision.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "devices/cpu/kernels.h"
#include "expertile/program.h"

namespace expertile::cpu {

enum class Operand { Half, Float };  // activations (and with Float the weights too, as they are)

class PanelGemm {
 public:
  // At most this many rows in a block: what bounds the partial sums.
  static constexpr std::size_t kMaxRows = 256;
  static constexpr std::size_t kMaxPanel = 64;
  static constexpr std::size_t kRowUnit = 16;  // a block is filled and cut by multiples of so many rows

  // `precision` is that of halves; F32 is used in fp32. A panel holds at least `together` (<= 16) weight rows.
  PanelGemm(const Kernels& kernels, Type type, Operand operand, Precision precision, std::size_t n_inner,
            std::size_t together = 1);

  const Kernels& kernels() const { return kernels_; }
  // Weight rows of one call of multiply() at most: those decoded side by side; with so many rows of activations.
  std::size_t panel_weights() const;
  std::size_t panel_weights(std::size_t n_rows) const;
  std::size_t max_rows() const;  // of a block, so that it stays in cache

  // A block of n_rows activation rows, as this product reads them: fp32, cut in steps of k, rows of a step next to each
  // other; or the tiles of TileKernels.
  std::size_t block_floats(std::size_t n_rows) const;
  // One row by itself: of floats, since halves may be packed 16 rows at a time.
  void convert_row(const void* from, std::size_t row, std::size_t n_rows, float* block) const;
  // Rows begin .. end of the block, begin a multiple of 16; source(row) is where a row begins.
  template <class Source>
  void convert_rows(const Source& source, std::size_t begin, std::size_t end, std::size_t n_rows, float* block) const {
    const void* rows[kRowUnit];
    for (; begin < end; begin += kRowUnit) {
      const std::size_t count = std::min(kRowUnit, end - begin);
      for (std::size_t i = 0; i < count; ++i) rows[i] = source(begin + i);
      convert_some(rows, begin, count, n_rows, block);
    }
  }

  // Rows first_row .. first_row + count of a block of n_rows (<= kMaxRows) by n_weights <= panel_weights(n_rows)
  // weights; first_row a multiple of 16. `sums` [count][sums_stride]; `scratch` of scratch_bytes(), one for each
  // worker.
  struct Panel {
    const std::uint8_t* const* weights;
    int n_weights;
    const float* block;
    std::size_t n_rows;
    std::size_t first_row;
    std::size_t count;
    float* sums;
    std::size_t sums_stride;
  };
  std::size_t scratch_bytes() const;
  void multiply(const Panel& panel, std::byte* scratch) const;

 private:
  // What a row of the panel holds: halves, floats or halves rounded to bf16, all as fp32; or tiles of bf16.
  enum class Way { Halves, Floats, Rounded, Tiles };
  static Way way_of(const Kernels& kernels, Operand operand, Precision precision);

  void convert_some(const void* const* rows, std::size_t first, std::size_t count, std::size_t n_rows,
                    float* block) const;
  bool is_direct(std::size_t n_rows) const;
  std::size_t inner_step(std::size_t n_rows) const;
  void decode(const Panel& panel, std::size_t k, std::size_t n, float* to) const;
  void step(const Panel& panel, std::size_t k, std::size_t n, const float* decoded, float* partial) const;

  const Kernels& kernels_;
  FormatKernels format_;
  Way way_;
  bool exact_;
  std::size_t panel_weights_;
  std::size_t n_inner_;
  std::size_t elements_;
  std::size_t bytes_;
};

}  // namespace expertile::cpu
