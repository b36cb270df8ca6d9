// panel_gemm.h: the blocked product that every native GEMM of the cpu device is made of.
//
// sums[r, w] = sum over k of rows[r, k] * weights[w, k]: `weights` compressed rows of one format, decoded once into a
// panel of fp32 values that stays in cache, and used for all rows; for very few rows the decoder feeds the sums.
// Either way each sum is added up in the one order of kernels.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "devices/cpu/kernels.h"

namespace expertile::cpu {

enum class Operand { Half, Float };  // activations (and with Float the weights too, as they are)

class PanelGemm {
 public:
  // At most this many rows in one call of `multiply`: what bounds the partial sums.
  static constexpr std::size_t kMaxRows = 256;
  static constexpr int kMaxPanel = 64;

  PanelGemm(const Kernels& kernels, Type type, Operand operand, std::size_t n_inner);

  const Kernels& kernels() const { return kernels_; }
  std::size_t panel_weights() const { return kernels_.panel_weights; }

  // Activation rows as fp32, cut in steps of k, rows of a step next to each other. `n_rows` is the block's.
  std::size_t row_floats() const { return padded(n_inner_); }
  void convert_row(const void* from, std::size_t row, std::size_t n_rows, float* block) const;

  // Rows first_row .. first_row + count of a block of n_rows (<= kMaxRows) by n_weights <= panel_weights() weights.
  // `sums` [count][sums_stride]; `scratch` of scratch_bytes(), one for each worker.
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
  bool is_direct(std::size_t n_rows) const;
  std::size_t inner_step(std::size_t n_rows) const;
  void decode(const Panel& panel, std::size_t k, std::size_t n, float* to) const;
  void step(const Panel& panel, std::size_t k, std::size_t n, const float* decoded, float* partial) const;

  const Kernels& kernels_;
  FormatKernels format_;
  Operand operand_;
  std::size_t n_inner_;
  std::size_t elements_;
  std::size_t bytes_;
};

}  // namespace expertile::cpu
