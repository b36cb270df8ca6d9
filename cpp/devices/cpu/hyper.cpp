// The read of the hyper-connection: norms of the streams, the inject product in fp32, the gated mean of the streams.
#include "devices/cpu/hyper.h"

#include <algorithm>
#include <cmath>

#include "devices/cpu/gemm.h"
#include "devices/cpu/rows.h"

namespace expertile::cpu {

void gr_norm_h(const NativeCall& call) {
  const auto& args = call.arguments<args::NormArgs>();
  const auto* x = call.buffer<const float>(1);
  const auto* gamma = call.buffer<const float>(2);
  auto* normalised = call.buffer<std::uint16_t>(3);
  auto* inverse_rms = call.buffer<float>(4);
  auto* saturated = call.buffer<std::uint64_t>(5);
  const std::size_t n = args.dim, streams = args.n_streams;
  call.pool.run_ranges(args.n_tokens * streams, row_grain(n), [&](std::size_t begin, std::size_t end, int worker) {
    auto* row = reinterpret_cast<float*>(call.pool.scratch(worker, n * sizeof(float)));
    std::uint64_t count = 0;
    for (std::size_t i = begin; i < end; ++i) {
      const float mean = call.kernels.square_sum(x + i * n, n) / static_cast<float>(n);
      const float inverse = 1.0f / std::sqrt(mean + args.eps);
      inverse_rms[i] = inverse;
      call.kernels.normalise_row(x + i * n, inverse, gamma + i % streams * n, n, row);
      call.kernels.round_row(row, n, normalised + i * n, &count);
    }
    count_saturated(saturated, count);
  });
}

void gr_inject(const NativeCall& call) {
  const auto& args = call.arguments<args::NormArgs>();
  const auto* x = call.buffer<const float>(1);
  const auto* inverse_rms = call.buffer<const float>(2);
  const auto* gamma = call.buffer<const float>(3);
  const auto* weights = call.buffer<const std::uint8_t>(4);
  auto* inject = call.buffer<float>(5);
  const std::size_t n = args.dim, streams = args.n_streams, width = n * streams;
  const PanelGemm gemm(call.kernels, Type::F32, Operand::Float, Precision::Exact, width);
  constexpr std::size_t kTokens = 24;  // share one copy of the weights
  call.pool.run((args.n_tokens + kTokens - 1) / kTokens, [&](std::size_t task, int worker) {
    const std::size_t first = task * kTokens;
    const std::size_t count = std::min<std::size_t>(kTokens, args.n_tokens - first);
    // The row after the block's is where a token's normalised streams are made.
    const TaskScratch scratch =
        TaskScratch::take(call.pool, worker, gemm, count + 1, count * gemm.panel_weights(count));
    float* row = scratch.block + gemm.block_floats(count);
    for (std::size_t i = 0; i < count; ++i) {
      for (std::size_t c = 0; c < streams; ++c) {
        const std::size_t stream = (first + i) * streams + c;
        call.kernels.normalise_row(x + stream * n, inverse_rms[stream], gamma + c * n, n, row + c * n);
      }
      gemm.convert_row(row, i, count, scratch.block);
    }
    const PanelGemm::Panel panel{nullptr, 0, scratch.block, count, 0, count, scratch.sums, 0};
    for_panels(
        gemm, panel, 0, streams, 1, scratch.rest,
        [&](std::size_t, std::size_t column) { return weights + column * width * sizeof(float); },
        [&](std::size_t column, std::size_t columns, const float* sums) {
          for (std::size_t i = 0; i < count; ++i, sums += columns) {
            std::copy_n(sums, columns, inject + (first + i) * streams + column);
          }
        });
  });
}

// mixed[d] = (1/C) * sum over c of xn[c, d] * sigmoid(gate[c, d]), gate = W_up lo.
void gemm_hc_up(const NativeCall& call, Type type) {
  const auto& args = call.arguments<args::HcUpArgs>();
  const auto* lo = call.buffer<const std::uint16_t>(1);
  const Matrix matrix{call.buffer<const std::uint8_t>(2), args.weight_row_bytes};
  const auto* x = call.buffer<const float>(3);
  const auto* inverse_rms = call.buffer<const float>(4);
  const auto* gamma = call.buffer<const float>(5);
  auto* mixed = call.buffer<float>(6);
  auto* mixed_half = call.buffer<std::uint16_t>(7);
  auto* saturated = call.buffer<std::uint64_t>(8);
  const std::size_t n = args.dim, streams = args.n_streams;
  const PanelGemm gemm(call.kernels, type, Operand::Half, call.precision, args.n_inner, streams);
  dense_product(
      call.pool, gemm, args.n_tokens, n, streams, [&](std::size_t token) { return lo + token * args.n_inner; },
      [&](std::size_t c, std::size_t d) { return matrix.row(c * n + d); },
      [&](std::size_t first, std::size_t count, std::size_t d, std::size_t columns, const float* sums) {
        std::uint64_t over = 0;
        float gate[PanelGemm::kMaxPanel], sum[PanelGemm::kMaxPanel], normalised[PanelGemm::kMaxPanel];
        for (std::size_t token = first; token < first + count; ++token, sums += streams * columns) {
          call.kernels.sigmoid_row(sums, streams * columns, gate);
          std::fill_n(sum, columns, 0.0f);
          for (std::size_t c = 0; c < streams; ++c) {
            const std::size_t stream = token * streams + c;
            call.kernels.normalise_row(x + stream * n + d, inverse_rms[stream], gamma + c * n + d, columns, normalised);
            call.kernels.add_product_row(normalised, gate + c * columns, columns, sum);
          }
          for (std::size_t i = 0; i < columns; ++i) mixed[token * n + d + i] = sum[i] / static_cast<float>(streams);
          call.kernels.round_row(mixed + token * n + d, columns, mixed_half + token * n + d, &over);
        }
        count_saturated(saturated, over);
      });
}

}  // namespace expertile::cpu
