// tile_gemm.h: products by matrix tiles of bf16. Included behind simd_*.h, micro.h and a `Tiles`.
//
// A tile of weights is 16 outputs by 32 values of k; one of a block's rows is 16 words of k by 16 columns; their
// product is 16 outputs by 16 columns. Rows have two tiles, of their high and of their low parts; up to eight share
// one, their low parts in the columns behind the high ones: half the products, and the same sums. Weights are decoded
// 256 values of k at once, and between two of their rows the tiles of the values decoded before are multiplied: the
// decoder's and the tiles' units of a core work at the same time.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "devices/cpu/kernels.h"
#include "devices/cpu/prefetch.h"

namespace {

using expertile::cpu::kPack;
using expertile::cpu::TileKernels;
using expertile::cpu::TilePanel;

constexpr std::size_t kTile = 16;                   // rows of a tile, and its words in a row
constexpr std::size_t kTileWords = kTile * kTile;   // also the sums of a tile
constexpr std::size_t kStepWords = 2 * kTileWords;  // of 32 values of 16 rows: high parts, low parts
constexpr std::size_t kDecoded = 256;               // values of k decoded at once
constexpr std::size_t kRowWords = kDecoded / 2;     // of one decoded row
constexpr std::size_t kGroupWords = kTile * kRowWords;
constexpr std::size_t kTileRows = 96;       // of a block
constexpr std::size_t kShared = kTile / 2;  // rows that share a tile

constexpr std::size_t step_words(std::size_t n_rows) { return n_rows <= kShared ? kTileWords : kStepWords; }

constexpr std::size_t steps_of(std::size_t n) { return (n + kPack - 1) / kPack; }

std::size_t tile_block_words(std::size_t n_inner, std::size_t n_rows) {
  return (n_rows + kTile - 1) / kTile * steps_of(n_inner) * kStepWords;
}

// 32 values of a row of halves, zeros behind its end.
inline void pack_step(const std::uint16_t* from, std::size_t n, std::uint32_t* high, std::uint32_t* low) {
  if (n >= kPack) {
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(from);
    store_split(Simd::load_half(bytes), Simd::load_half(bytes + 32), high, low);
    return;
  }
  alignas(64) std::uint8_t tail[2 * kPack] = {};
  std::memcpy(tail, from, 2 * n);
  store_split(Simd::load_half(tail), Simd::load_half(tail + 32), high, low);
}

// Up to 16 rows, as columns of the block's tiles; the columns behind them are zeros.
void convert_tile_rows(const std::uint16_t* const* rows, std::size_t n_rows, std::size_t n_inner, std::size_t tile,
                       std::uint32_t* block) {
  alignas(64) std::uint32_t part[kStepWords] = {};
  const bool shared = n_rows <= kShared;
  std::uint32_t* low = part + (shared ? kShared * kTile : kTileWords);
  std::uint32_t* to = block + tile * steps_of(n_inner) * kStepWords;
  for (std::size_t k = 0; k < n_inner; k += kPack, to += step_words(n_rows)) {
    for (std::size_t row = 0; row < n_rows; ++row) {
      pack_step(rows[row] + k, n_inner - k, part + row * kTile, low + row * kTile);
    }
    Simd::transpose(part, to);
    if (!shared) Simd::transpose(low, to + kTileWords);
  }
}

// Four tiles of sums for 16 rows: the products of their high and low parts with two groups of 16 rounded weights, or
// with the high and low parts of one group. They stay in registers over the whole of k where there are no more rows.
template <bool Exact>
class TileProduct {
 public:
  static constexpr std::size_t kWeights = Exact ? kTile : 2 * kTile;

  explicit TileProduct(const TilePanel& panel)
      : p_(panel),
        steps_(steps_of(panel.n_inner)),
        first_tile_(panel.first_row / kTile),
        passes_((panel.count + kTile - 1) / kTile),
        both_(Exact || static_cast<std::size_t>(panel.n_weights) > kTile),
        row_bytes_(panel.n_inner / panel.elements * panel.bytes),
        group_bytes_(kDecoded * panel.bytes / panel.elements),
        decoded_(reinterpret_cast<std::uint32_t*>(panel.scratch)),
        sums_(reinterpret_cast<float*>(panel.scratch) + 4 * kGroupWords) {}

  void run() {
    Tiles::configure();
    const int n_weights = p_.n_weights;
    for (int row = 0; row < n_weights; ++row) decode(0, row);
    for (std::size_t k = 0; k < p_.n_inner; k += kDecoded) {
      const bool more = k + kDecoded < p_.n_inner;
      const std::size_t products = passes_ * steps_of(std::min(kDecoded, p_.n_inner - k));
      std::size_t done = 0;
      for (int row = 0; more && row < n_weights; ++row) {
        decode(k + kDecoded, row);
        const std::size_t until = products * static_cast<std::size_t>(row + 1) / static_cast<std::size_t>(n_weights);
        for (; done < until; ++done) product(k, done);
      }
      for (; done < products; ++done) product(k, done);
    }
    Tiles::release();
    for (std::size_t pass = 0; pass < passes_; ++pass) write_sums(pass);
  }

 private:
  std::uint32_t* buffer(std::size_t k) const { return decoded_ + k / kDecoded % 2 * 2 * kGroupWords; }

  // Formats of single weights have an n that is no multiple of the group; the others' blocks are 256 or a part of it.
  void decode(std::size_t k, int row) const {
    const std::size_t n = std::min(kDecoded, p_.n_inner - k);
    std::uint32_t* to = buffer(k) + static_cast<std::size_t>(row) * kRowWords;
    const std::uint8_t* from = p_.weights[row] + k / kDecoded * group_bytes_;
    // The same place in the panel behind this one.
    prefetch_behind<kToL2>(from, kWeights * row_bytes_, group_bytes_);
    p_.format.pack(from, n, to, Exact ? to + kGroupWords : nullptr);
  }

  // Rows that the tiles of a pass were filled with.
  std::size_t rows_of(std::size_t pass) const { return std::min(kTile, p_.n_rows - p_.first_row - pass * kTile); }

  // One step of 32 values of 16 rows, with the load and the store of their sums.
  void product(std::size_t k, std::size_t index) const {
    const std::size_t steps = steps_of(std::min(kDecoded, p_.n_inner - k));
    const std::size_t pass = index / steps, step = index % steps;
    float* sums = sums_ + pass * 4 * kTileWords;
    if (step == 0 && k == 0) {
      zero_sums();
    } else if (step == 0 && passes_ > 1) {
      load_sums(sums);
    }
    const std::uint32_t* weights = buffer(k) + step * kTile;
    const std::size_t words = step_words(rows_of(pass));
    const std::uint32_t* rows = p_.block + (first_tile_ + pass) * steps_ * kStepWords + (k / kPack + step) * words;
    Tiles::load<4>(weights, 4 * kRowWords);
    Tiles::load<6>(rows, Tiles::kRow);
    Tiles::dot<0, 4, 6>();
    if (both_) {
      Tiles::load<5>(weights + kGroupWords, 4 * kRowWords);
      Tiles::dot<2, 5, 6>();
    }
    if (words == kStepWords) {
      Tiles::load<7>(rows + kTileWords, Tiles::kRow);
      Tiles::dot<1, 4, 7>();
      if (both_) Tiles::dot<3, 5, 7>();
    }
    // With more rows the tiles' products take longer than the loads.
    if (passes_ == 1) {
      const auto* next = reinterpret_cast<const std::uint8_t*>(rows);
      prefetch_behind<kToL1>(next, sizeof(*rows) * words, sizeof(*rows) * words);
    }
    if (step + 1 == steps && (passes_ > 1 || k + kDecoded >= p_.n_inner)) store_sums(sums);
  }

  static void zero_sums() {
    Tiles::zero<0>();
    Tiles::zero<1>();
    Tiles::zero<2>();
    Tiles::zero<3>();
  }
  static void load_sums(const float* sums) {
    Tiles::load<0>(sums, Tiles::kRow);
    Tiles::load<1>(sums + kTileWords, Tiles::kRow);
    Tiles::load<2>(sums + 2 * kTileWords, Tiles::kRow);
    Tiles::load<3>(sums + 3 * kTileWords, Tiles::kRow);
  }
  static void store_sums(float* sums) {
    Tiles::store<0>(sums, Tiles::kRow);
    Tiles::store<1>(sums + kTileWords, Tiles::kRow);
    Tiles::store<2>(sums + 2 * kTileWords, Tiles::kRow);
    Tiles::store<3>(sums + 3 * kTileWords, Tiles::kRow);
  }

  // The sums of a pass, from [weight][row] to the caller's [row][weight].
  void write_sums(std::size_t pass) const {
    float* sums = sums_ + pass * 4 * kTileWords;
    const std::size_t count = std::min(kTile, p_.count - pass * kTile);
    const std::size_t low =
        rows_of(pass) <= kShared ? kShared : kTileWords;  // from a sum of high parts to that of low ones
    const auto n_weights = static_cast<std::size_t>(p_.n_weights);
    alignas(64) std::uint32_t by_row[kTileWords];
    for (std::size_t w = 0; w < n_weights; w += kTile, sums += 2 * kTileWords) {
      for (std::size_t i = 0; i < kTileWords; ++i) {
        float sum = sums[i] + sums[i + low];
        if (Exact) sum = (sum + sums[i + 2 * kTileWords]) + sums[i + 2 * kTileWords + low];
        sums[i] = sum;
      }
      Simd::transpose(reinterpret_cast<const std::uint32_t*>(sums), by_row);
      float* to = p_.sums + pass * kTile * p_.sums_stride + w;
      for (std::size_t row = 0; row < count; ++row, to += p_.sums_stride) {
        std::memcpy(to, by_row + row * kTile, sizeof(float) * std::min(kTile, n_weights - w));
      }
    }
  }

  const TilePanel& p_;
  std::size_t steps_, first_tile_, passes_;
  bool both_;                            // tiles of weights
  std::size_t row_bytes_, group_bytes_;  // of a row, of its values decoded at once
  std::uint32_t* decoded_;               // two buffers of two groups or two parts
  float* sums_;
};

void tile_multiply(const TilePanel& panel) {
  if (panel.exact) {
    TileProduct<true>(panel).run();
  } else {
    TileProduct<false>(panel).run();
  }
}

constexpr TileKernels tile_kernels() {
  return {.max_rows = kTileRows,
          .weights = {TileProduct<false>::kWeights, TileProduct<true>::kWeights},
          .scratch_bytes = 4 * (4 * kGroupWords + kTileRows / kTile * 4 * kTileWords),
          .block_words = tile_block_words,
          .convert_rows = convert_tile_rows,
          .multiply = tile_multiply};
}

}  // namespace
