// chains.h: the multiply-adds that a core can do at most: independent sums in registers, no memory. Behind simd_*.h.
#pragma once

#include <cstddef>

#include "devices/cpu/unroll.h"

namespace {

// Enough sums under way to hide a multiply-add's latency on two ports (four on NEON), in the registers that there are.
inline constexpr int kChains = Simd::kWidth == 8 ? 12 : 16;

// `n` rounds of kChains multiply-adds of kWidth lanes, into `sink`; returns the operations done.
double multiply_adds(std::size_t n, float* sink) {
  Simd::Part sums[kChains];
  EXPERTILE_UNROLL
  for (int chain = 0; chain < kChains; ++chain) sums[chain] = Simd::zero_part();
  Simd::Part a = Simd::load_part(sink), b = Simd::load_part(sink + Simd::kWidth);
  Simd::keep(a);
  Simd::keep(b);
  for (std::size_t i = 0; i < n; ++i) {
    EXPERTILE_UNROLL
    for (int chain = 0; chain < kChains; ++chain) {
      sums[chain] = Simd::fused(a, b, sums[chain]);
      Simd::keep(sums[chain]);
    }
  }
  EXPERTILE_UNROLL
  for (int chain = 0; chain < kChains; ++chain) Simd::store_part(sink + chain * Simd::kWidth, sums[chain]);
  return static_cast<double>(n) * kChains * Simd::kWidth * 2;
}

}  // namespace
