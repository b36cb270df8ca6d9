// gather.cpp: the two ends of the plan, native: tokens to rows, and the rows' results back to tokens.
#include <algorithm>
#include <cstring>

#include "args.h"
#include "devices/cpu/native.h"
#include "devices/cpu/plan.h"
#include "devices/cpu/thread_pool.h"

namespace expertile {
namespace {

constexpr std::size_t kCopyBytes = 1 << 16;  // what a thread takes at a time, at least

// rows[r] = x[token of r], zero for padding.
void gather(const NativeCall& call, std::size_t row_bytes) {
  const std::size_t n_rows = std::min(call.buffer<const std::uint32_t>(1)[EXPERTILE_META_ROWS], call.grid[0]);
  const std::int32_t* row_token = call.buffer<const std::int32_t>(2);
  const std::byte* x = call.buffer<const std::byte>(3);
  std::byte* rows = call.buffer<std::byte>(4);
  const std::size_t grain = std::max<std::size_t>(1, kCopyBytes / row_bytes);
  call.pool.run_ranges(n_rows, grain, [&](std::size_t from, std::size_t to, int) {
    for (std::size_t r = from; r < to; ++r) {
      std::byte* row = rows + r * row_bytes;
      if (row_token[r] >= 0) {
        std::memcpy(row, x + static_cast<std::size_t>(row_token[r]) * row_bytes, row_bytes);
      } else {
        std::memset(row, 0, row_bytes);
      }
    }
  });
}

// By sixteens: a fixed count is what compilers turn into vector code at -O2.
void add_product(float* __restrict sum, float weight, const float* __restrict y, std::size_t n) {
  std::size_t d = 0;
  for (; d + 16 <= n; d += 16) {
    for (std::size_t j = d; j < d + 16; ++j) sum[j] = sum[j] + (weight * y[j]);
  }
  for (; d < n; ++d) sum[d] = sum[d] + (weight * y[d]);
}

}  // namespace

void cpu_mm_gather(const NativeCall& call) { gather(call, call.arguments<args::GatherArgs>().dim * sizeof(float)); }

void cpu_mm_gather_h(const NativeCall& call) {
  gather(call, call.arguments<args::GatherArgs>().dim * sizeof(std::uint16_t));
}

// routed[t] = sum over the slots, in their order, of weight * y[row].
void cpu_mm_combine(const NativeCall& call) {
  const auto& a = call.arguments<args::CombineArgs>();
  const std::int32_t* position = call.buffer<const std::int32_t>(1);
  const float* row_weight = call.buffer<const float>(2);
  const float* y = call.buffer<const float>(3);
  float* routed = call.buffer<float>(4);
  const std::size_t dim = a.dim;
  const std::size_t grain = std::max<std::size_t>(1, kCopyBytes / (dim * a.top_k * sizeof(float)));
  call.pool.run_ranges(a.n_tokens, grain, [&](std::size_t from, std::size_t to, int) {
    for (std::size_t token = from; token < to; ++token) {
      float* sum = routed + token * dim;
      std::fill_n(sum, dim, 0.0f);
      for (std::size_t slot = 0; slot < a.top_k; ++slot) {
        const std::int32_t row = position[token * a.top_k + slot];
        if (row >= 0) add_product(sum, row_weight[row], y + static_cast<std::size_t>(row) * dim, dim);
      }
    }
  });
}

}  // namespace expertile
