// The native kernels that work value by value: SwiGLU in its forms, the low-rank epilogue, the write into the streams.
#include "args.h"
#include "devices/cpu/hyper.h"
#include "devices/cpu/kernels.h"
#include "devices/cpu/native.h"
#include "devices/cpu/rows.h"
#include "devices/cpu/thread_pool.h"

#include <algorithm>
#include <string_view>

namespace expertile {
namespace cpu {
namespace {

// loh = half(silu(lo / C))
void gr_epi_down(const NativeCall& call) {
  const auto& args = call.arguments<args::ElementArgs>();
  const auto* lo = call.buffer<const float>(1);
  auto* loh = call.buffer<std::uint16_t>(2);
  auto* saturated = call.buffer<std::uint64_t>(3);
  const std::size_t n = args.n_cols;
  call.pool.run_ranges(args.n_rows, row_grain(n), [&](std::size_t begin, std::size_t end, int) {
    std::uint64_t count = 0;
    call.kernels.silu_half_row(lo + begin * n, args.divisor, (end - begin) * n, loh + begin * n, &count);
    count_saturated(saturated, count);
  });
}

// hh = half(silu(gsh) * ush)
void swiglu_h(const NativeCall& call) {
  const auto& args = call.arguments<args::ElementArgs>();
  const auto* gate = call.buffer<const float>(1);
  const auto* up = call.buffer<const float>(2);
  auto* to = call.buffer<std::uint16_t>(3);
  auto* saturated = call.buffer<std::uint64_t>(4);
  const std::size_t n = args.n_cols;
  call.pool.run_ranges(args.n_rows, row_grain(n), [&](std::size_t begin, std::size_t end, int) {
    std::uint64_t count = 0;
    call.kernels.swiglu_half_row(gate + begin * n, up + begin * n, (end - begin) * n, to + begin * n, &count);
    count_saturated(saturated, count);
  });
}

// h = half(silu(g) * u) for the plan's rows, zero for its padding.
void act_f16(const NativeCall& call) {
  const auto& args = call.arguments<args::ElementArgs>();
  const auto* meta = call.buffer<const std::uint32_t>(1);
  const auto* row_token = call.buffer<const std::int32_t>(2);
  const auto* gate = call.buffer<const float>(3);
  const auto* up = call.buffer<const float>(4);
  auto* to = call.buffer<std::uint16_t>(5);
  auto* saturated = call.buffer<std::uint64_t>(6);
  const std::size_t n = args.n_cols;
  call.pool.run_ranges(meta[EXPERTILE_META_ROWS], row_grain(n), [&](std::size_t begin, std::size_t end, int) {
    std::uint64_t count = 0;
    for (std::size_t row = begin; row < end; ++row) {
      if (row_token[row] < 0) {
        std::fill_n(to + row * n, n, std::uint16_t{0});
      } else {
        call.kernels.swiglu_half_row(gate + row * n, up + row * n, n, to + row * n, &count);
      }
    }
    count_saturated(saturated, count);
  });
}

// The write into the streams of tokens begin..end: x[c] += 2 * sigmoid(inject[c] / C) * (routed + sigmoid(sgv) * ys).
// `routed(token, row)` puts a token's weighted sum of experts into `row`.
template <class Routed>
void write_streams(const NativeCall& call, std::size_t n_tokens, std::size_t streams, std::size_t n, unsigned first,
                   const Routed& routed) {
  const auto* shared = call.buffer<const float>(first);
  const auto* shared_gate = call.buffer<const float>(first + 1);
  const auto* inject = call.buffer<const float>(first + 2);
  auto* x = call.buffer<float>(first + 3);
  call.pool.run_ranges(n_tokens, row_grain(n * streams), [&](std::size_t begin, std::size_t end, int worker) {
    auto* out = reinterpret_cast<float*>(call.pool.scratch(worker, n * sizeof(float)));
    for (std::size_t token = begin; token < end; ++token) {
      float gate;
      call.kernels.sigmoid_row(shared_gate + token, 1, &gate);
      routed(token, out);
      call.kernels.add_scaled_row(shared + token * n, gate, n, out);
      for (std::size_t c = 0; c < streams; ++c) {
        const float scaled = inject[token * streams + c] / static_cast<float>(streams);
        float weight;
        call.kernels.sigmoid_row(&scaled, 1, &weight);
        call.kernels.add_scaled_row(out, 2.0f * weight, n, x + (token * streams + c) * n);
      }
    }
  });
}

void moe_out(const NativeCall& call) {
  const auto& args = call.arguments<args::OutArgs>();
  const auto* routed = call.buffer<const float>(1);
  const std::size_t n = args.dim;
  write_streams(call, args.n_tokens, args.n_streams, n, 2,
                [&](std::size_t token, float* row) { std::copy_n(routed + token * n, n, row); });
}

// mm_combine and moe_out in one: the weighted sum of a token's rows stays in cache.
void moe_out_combine(const NativeCall& call) {
  const auto& args = call.arguments<args::CombineOutArgs>();
  const auto* position = call.buffer<const std::int32_t>(1);
  const auto* row_weight = call.buffer<const float>(2);
  const auto* y = call.buffer<const float>(3);
  const std::size_t n = args.dim, top_k = args.top_k;
  write_streams(call, args.n_tokens, args.n_streams, n, 4, [&](std::size_t token, float* row) {
    std::fill_n(row, n, 0.0f);
    for (std::size_t slot = 0; slot < top_k; ++slot) {
      const std::int32_t at = position[token * top_k + slot];
      if (at >= 0) call.kernels.add_scaled_row(y + static_cast<std::size_t>(at) * n, row_weight[at], n, row);
    }
  });
}

// A chosen expert's place: by falling logit, then by rising id. NaN is never greater, so it is never chosen.
struct Choice {
  float logit;
  std::int32_t id;
};

// Ids and weights of one token; false where it cannot be routed.
bool route(const Kernels& kernels, const float* logits, std::size_t n_experts, std::size_t top_k, std::int32_t* ids,
           float* weights) {
  constexpr float kInfinity = __builtin_inff();
  Choice chosen[32];
  std::size_t count = 0;
  for (std::size_t e = 0; e < n_experts; ++e) {
    const float logit = logits[e];
    if (logit == kInfinity) return false;
    if (!(logit > -kInfinity) || (count == top_k && !(logit > chosen[count - 1].logit))) continue;
    std::size_t at = count < top_k ? count++ : count - 1;
    for (; at > 0 && logit > chosen[at - 1].logit; --at) chosen[at] = chosen[at - 1];
    chosen[at] = {logit, static_cast<std::int32_t>(e)};
  }
  if (count < top_k) return false;
  float exponents[32] = {};
  for (std::size_t slot = 0; slot < top_k; ++slot) exponents[slot] = chosen[slot].logit - chosen[0].logit;
  kernels.exp_row(exponents, top_k, exponents);
  float sum = 0.0f;
  for (std::size_t slot = 0; slot < top_k; ++slot) sum = sum + exponents[slot];
  for (std::size_t slot = 0; slot < top_k; ++slot) {
    ids[slot] = chosen[slot].id;
    weights[slot] = exponents[slot] / sum;
  }
  return true;
}

void route_topk(const NativeCall& call) {
  const auto& args = call.arguments<args::RouteArgs>();
  const auto* logits = call.buffer<const float>(1);
  auto* ids = call.buffer<std::int32_t>(2);
  auto* weights = call.buffer<float>(3);
  auto* status = call.buffer<std::uint32_t>(4);
  const std::size_t n = args.n_experts, k = args.top_k;
  call.pool.run_ranges(args.n_tokens, 8, [&](std::size_t begin, std::size_t end, int) {
    for (std::size_t token = begin; token < end; ++token) {
      if (route(call.kernels, logits + token * n, n, k, ids + token * k, weights + token * k)) continue;
      std::fill_n(ids + token * k, k, -1);
      std::fill_n(weights + token * k, k, 0.0f);
      if (status[token] == 0) status[token] = args.layer + 1;
    }
  });
}

struct Named {
  std::string_view name;
  NativeKernel kernel;
};

constexpr Named kKernels[] = {
    {"gr_norm_h", gr_norm_h},
    {"gr_inject", gr_inject},
    {"gr_epi_down", gr_epi_down},
    {"gr_epi_down_v4", gr_epi_down},
    {"swiglu_h", swiglu_h},
    {"swiglu_h_v4", swiglu_h},
    {"act_f16", act_f16},
    {"act_f16_v4", act_f16},
    {"moe_out", moe_out},
    {"moe_out_v4", moe_out},
    {"moe_out_combine", moe_out_combine},
    {"moe_out_combine_v4", moe_out_combine},
    {"route_topk", route_topk},
};

}  // namespace
}  // namespace cpu

NativeKernel find_native_elementwise(const std::string& name) {
  for (const cpu::Named& named : cpu::kKernels) {
    if (named.name == name) return named.kernel;
  }
  return nullptr;
}

}  // namespace expertile
