// micro.h: the register-blocked micro-kernel, the direct dot products, and the decoders as functions over rows.
//
// Included last in a unit of one instruction set, behind simd_*.h and the decoders.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "devices/cpu/kernels.h"
#include "devices/cpu/prefetch.h"
#include "devices/cpu/unroll.h"

namespace {

using expertile::cpu::DirectStep;
using expertile::cpu::MicroStep;

template <bool Fused>
inline Simd::Part accumulate(Simd::Part a, Simd::Part b, Simd::Part sum) {
  return Fused ? Simd::fused(a, b, sum) : Simd::separate(a, b, sum);
}

// sums[i * stride] for the N vectors of one activation row.
template <int N>
inline void add_up(const Simd::Vector* vectors, float* sums) {
  int i = 0;
  for (; i + 4 <= N; i += 4) Simd::sum4(vectors + i, sums + i);
  for (; i < N; ++i) sums[i] = Simd::sum(vectors[i]);
}

template <int Weights, int Rows, bool Fused>
void micro(const MicroStep& step) {
  Simd::Vector sum[Rows][Weights];
  EXPERTILE_UNROLL
  for (int r = 0; r < Rows; ++r) {
    EXPERTILE_UNROLL
    for (int w = 0; w < Weights; ++w) {
      EXPERTILE_UNROLL
      for (int p = 0; p < Simd::kParts; ++p) {
        const float* from = step.partial + (r * Weights + w) * 16 + p * Simd::kWidth;
        sum[r][w].part[p] = step.first ? Simd::zero_part() : Simd::load_part(from);
      }
    }
  }
  const float* weights = step.weights;
  const float* rows = step.rows;
  for (std::size_t k = 0; k < step.n_inner; k += 16) {
    EXPERTILE_UNROLL
    for (int p = 0; p < Simd::kParts; ++p) {
      const std::size_t at = k + static_cast<std::size_t>(p * Simd::kWidth);
      Simd::Part weight[Weights];
      EXPERTILE_UNROLL
      for (int w = 0; w < Weights; ++w) {
        weight[w] = Simd::load_part(weights + static_cast<std::size_t>(w) * step.weight_stride + at);
      }
      EXPERTILE_UNROLL
      for (int r = 0; r < Rows; ++r) {
        Simd::Part row = Simd::load_part(rows + static_cast<std::size_t>(r) * step.row_stride + at);
        Simd::keep(row);
        EXPERTILE_UNROLL
        for (int w = 0; w < Weights; ++w) {
          sum[r][w].part[p] = accumulate<Fused>(weight[w], row, sum[r][w].part[p]);
        }
      }
    }
  }
  EXPERTILE_UNROLL
  for (int r = 0; r < Rows; ++r) {
    if (step.last) {
      add_up<Weights>(sum[r], step.sums + static_cast<std::size_t>(r) * step.sums_stride);
      continue;
    }
    EXPERTILE_UNROLL
    for (int w = 0; w < Weights; ++w) Simd::store(step.partial + (r * Weights + w) * 16, sum[r][w]);
  }
}

// The function of a step's sizes, out of a table of all sizes up to Weights x Rows.
template <int Weights, int Rows, bool Fused, std::size_t... I>
inline void micro_of_size(const MicroStep& step, std::index_sequence<I...>) {
  using Function = void (*)(const MicroStep&);
  static constexpr Function table[] = {micro<static_cast<int>(I) / Rows + 1, static_cast<int>(I) % Rows + 1, Fused>...};
  table[(step.n_weights - 1) * Rows + step.n_rows - 1](step);
}

template <int Weights, int Rows, bool Fused>
void multiply(const MicroStep& step) {
  micro_of_size<Weights, Rows, Fused>(step, std::make_index_sequence<static_cast<std::size_t>(Weights * Rows)>());
}

struct PanelSink {
  float* out;
  void put(int i, Simd::Vector v) { Simd::store(out + 16 * i, v); }
};

template <int Rows>
struct DotSink {
  const float* rows;
  std::size_t stride;
  Simd::Vector* sum;
  void put(int i, Simd::Vector v) {
    EXPERTILE_UNROLL
    for (int r = 0; r < Rows; ++r) {
      const float* row = rows + static_cast<std::size_t>(r) * stride + 16 * i;
      EXPERTILE_UNROLL
      for (int p = 0; p < Simd::kParts; ++p) {
        sum[r].part[p] = Simd::fused(v.part[p], Simd::load_part(row + p * Simd::kWidth), sum[r].part[p]);
      }
    }
  }
};

// Formats of single weights, 16 a step, the last step from a copy that ends in zeros.
template <class Format, class Sink>
inline void decode_plain(const std::uint8_t* p, std::size_t n, Sink& sink, std::size_t step) {
  const std::size_t left = n - step;
  if (left >= 16) {
    sink.put(0, Format::load(p + step * Format::bytes));
    return;
  }
  alignas(64) std::uint8_t tail[16 * Format::bytes] = {};
  std::memcpy(tail, p + step * Format::bytes, left * Format::bytes);
  sink.put(0, Format::load(tail));
}

template <class Format>
inline constexpr std::size_t kStep = Format::elements == 1 ? 16 : Format::elements;

// Hands the weights k .. k + kStep of a row to the sink.
template <class Format, class Sink>
inline void decode_step(const std::uint8_t* row, std::size_t n, std::size_t k, Sink& sink) {
  if constexpr (Format::elements == 1) {
    decode_plain<Format>(row, n, sink, k);
  } else {
    Format::decode(row + k / Format::elements * Format::bytes, sink);
  }
}

template <class Format>
[[gnu::flatten]] void decode_row(const std::uint8_t* blocks, std::size_t n, float* out) {
  for (std::size_t k = 0; k < n; k += kStep<Format>) {
    PanelSink sink{out + k};
    decode_step<Format>(blocks, n, k, sink);
  }
}

// All in one: behind a call of the decoder the sums would live in memory.
template <class Format, int Weights, int Rows>
[[gnu::flatten]] void direct(const DirectStep& step, int first) {
  Simd::Vector sum[Weights][Rows];
  EXPERTILE_UNROLL
  for (int w = 0; w < Weights; ++w) {
    EXPERTILE_UNROLL
    for (int r = 0; r < Rows; ++r) {
      EXPERTILE_UNROLL
      for (int p = 0; p < Simd::kParts; ++p) sum[w][r].part[p] = Simd::zero_part();
    }
  }
  const std::size_t row_bytes = step.n_inner / Format::elements * Format::bytes;
  for (std::size_t k = 0; k < step.n_inner; k += kStep<Format>) {
    EXPERTILE_UNROLL
    for (int w = 0; w < Weights; ++w) {
      const std::uint8_t* row = step.weights[first + w];
      // The rows of the next call.
      prefetch_behind<kToL1>(row + k / Format::elements * Format::bytes, Weights * row_bytes,
                             kStep<Format> / Format::elements * Format::bytes);
      DotSink<Rows> sink{step.rows + k, step.row_stride, sum[w]};
      decode_step<Format>(row, step.n_inner, k, sink);
    }
  }
  EXPERTILE_UNROLL
  for (int w = 0; w < Weights; ++w) {
    EXPERTILE_UNROLL
    for (int r = 0; r < Rows; ++r) {
      step.sums[static_cast<std::size_t>(r) * step.sums_stride + static_cast<std::size_t>(first + w)] =
          Simd::sum(sum[w][r]);
    }
  }
}

template <class Format, int Rows>
void direct_rows(const DirectStep& step) {
  int first = 0;
  for (; first + Simd::kDirectWeights <= step.n_weights; first += Simd::kDirectWeights) {
    direct<Format, Simd::kDirectWeights, Rows>(step, first);
  }
  for (; first < step.n_weights; ++first) direct<Format, 1, Rows>(step, first);
}

template <class Format>
void direct_dot(const DirectStep& step) {
  switch (step.n_rows) {
    case 1:
      direct_rows<Format, 1>(step);
      break;
    case 2:
      direct_rows<Format, 2>(step);
      break;
    case 3:
      direct_rows<Format, 3>(step);
      break;
    default:
      direct_rows<Format, 4>(step);
      break;
  }
}

// Two vectors of 16 halves to 16 words of bf16: their upper 8 significant bits, and the rest.
template <class S = Simd>
inline void store_split(Simd::Vector a, Simd::Vector b, std::uint32_t* high, std::uint32_t* low) {
  const Simd::Vector upper_a = S::upper(a), upper_b = S::upper(b);
  S::store_rounded(high, upper_a, upper_b);
  S::store_rounded(low, S::subtract(a, upper_a), S::subtract(b, upper_b));
}

template <bool Exact, class S = Simd>
inline void store_weights(Simd::Vector a, Simd::Vector b, std::uint32_t* high, std::uint32_t* low) {
  if constexpr (Exact) {
    store_split(a, b, high, low);
  } else {
    S::store_rounded(high, a, b);
  }
}

// Packs a block's vectors two by two: every decoder gives an even one right before the odd one behind it.
template <bool Exact>
struct PackSink {
  std::uint32_t* high;
  std::uint32_t* low;
  Simd::Vector even;
  void put(int i, Simd::Vector v) {
    if (i % 2 == 0) {
      even = v;
    } else {
      const int at = 16 * (i / 2);
      store_weights<Exact>(even, v, high + at, Exact ? low + at : nullptr);
    }
  }
};

struct OneSink {
  Simd::Vector value;
  void put(int, Simd::Vector v) { value = v; }
};

template <class Format, bool Exact>
void pack_blocks(const std::uint8_t* blocks, std::size_t n, std::uint32_t* high, std::uint32_t* low) {
  if constexpr (Format::elements == 1) {
    for (std::size_t k = 0; k < n; k += 32) {
      OneSink a, b{Simd::all(0.0f)};
      decode_step<Format>(blocks, n, k, a);
      if (k + 16 < n) decode_step<Format>(blocks, n, k + 16, b);
      store_weights<Exact>(a.value, b.value, high + k / 2, Exact ? low + k / 2 : nullptr);
    }
  } else {
    for (std::size_t k = 0; k < n; k += kStep<Format>) {
      PackSink<Exact> sink{high + k / 2, Exact ? low + k / 2 : nullptr, Simd::all(0.0f)};
      decode_step<Format>(blocks, n, k, sink);
    }
  }
}

template <class Format>
void pack_row(const std::uint8_t* blocks, std::size_t n, std::uint32_t* high, std::uint32_t* low) {
  if (low == nullptr) {
    pack_blocks<Format, false>(blocks, n, high, low);
  } else {
    pack_blocks<Format, true>(blocks, n, high, low);
  }
}

template <class Format, bool Packed>
constexpr expertile::cpu::FormatKernels format_kernels() {
  if constexpr (Packed) {
    return {decode_row<Format>, direct_dot<Format>, pack_row<Format>};
  } else {
    return {decode_row<Format>, direct_dot<Format>, nullptr};
  }
}

void bf16_row(std::size_t n, float* row) {
  for (std::size_t k = 0; k < n; k += 16) Simd::store(row + k, Simd::round_bf16(Simd::load(row + k)));
}

void half_row(const std::uint16_t* from, std::size_t n, float* to) {
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(from);
  std::size_t k = 0;
  for (; k + 16 <= n; k += 16) Simd::store(to + k, Simd::load_half(bytes + 2 * k));
  if (k == n) return;
  alignas(64) std::uint8_t tail[32] = {};
  std::memcpy(tail, bytes + 2 * k, 2 * (n - k));
  Simd::store(to + k, Simd::load_half(tail));
}

void round_row(const float* from, std::size_t n, std::uint16_t* to, std::uint64_t* saturated) {
  std::uint64_t count = 0;
  std::size_t k = 0;
  for (; k + 16 <= n; k += 16) Simd::store_half(to + k, Simd::saturate(Simd::load(from + k), count));
  if (k < n) {
    alignas(64) float tail[16] = {};
    alignas(64) std::uint16_t rounded[16];
    std::memcpy(tail, from + k, 4 * (n - k));
    Simd::store_half(rounded, Simd::saturate(Simd::load(tail), count));
    std::memcpy(to + k, rounded, 2 * (n - k));
  }
  *saturated += count;
}

}  // namespace
