// hyper.metal: the hyper-connection's read: C residual streams are normed, gated through a low rank R and averaged.
//
//   xn[c,:]  = x[c,:] / sqrt(mean(x[c,:]^2) + eps) * gamma[c,:]      gr_norm_h:   x [T,C,D] -> xnh half, inv_rms
//   inject   = W_inject @ xn                                         gr_inject:   fp32 weights -> inject [T,C]
//   lo       = silu((W_down @ xn) / C)                               gr_epi_down: GEMM's lo [T,R] -> loh half [T,R]
//   gate     = W_up @ lo
//   mixed[d] = (1/C) * sum over c, in order, of xn[c,d] * sigmoid(gate[c,d])
//                                                                    gemm_hc_up:  -> mixed fp32, mixh half [T,D]
//
// Fed by the streams; mixed feeds the router, mixh the experts, inject the write (moe_out).
#include "gemm_tile.h"

// Values of a stream that a thread of gr_norm_h keeps between its two passes: all of them up to 2,560 columns. They are
// also the loads that are on their way at once.
#define NORM_HELD 10

// One threadgroup a stream of a token: group.x = c, group.y = token.
[[kernel, max_total_threads_per_threadgroup(256)]] void gr_norm_h(
    constant NormArgs& args [[buffer(0)]], const device float* x [[buffer(1)]], const device float* gamma [[buffer(2)]],
    device half* xnh [[buffer(3)]], device float* inv_rms [[buffer(4)]], device atomic_uint* saturated [[buffer(5)]],
    uint2 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float partial[8];
  if (group.x >= args.n_streams || group.y >= args.n_tokens) {
    return;
  }
  const ulong stream = ulong(group.y) * args.n_streams + group.x;
  const device float* in = x + stream * args.dim;
  const device float* weight = gamma + ulong(group.x) * args.dim;
  device half* out = xnh + stream * args.dim;
  float held[NORM_HELD];
  for (uint i = 0; i < NORM_HELD; ++i) {
    held[i] = thread_index + i * 256 < args.dim ? in[thread_index + i * 256] : 0.0f;
  }
  float sum = 0.0f;
  for (uint i = 0; i < NORM_HELD; ++i) {
    sum = sum + held[i] * held[i];
  }
  for (uint d = thread_index + NORM_HELD * 256; d < args.dim; d += 256) {
    sum = sum + in[d] * in[d];
  }
  sum = threadgroup_sum(sum, lane, simdgroup, partial);
  const float scale = 1.0f / sqrt(sum / float(args.dim) + args.eps);
  uint count = 0;
  for (uint i = 0; i < NORM_HELD; ++i) {
    const uint d = thread_index + i * 256;
    if (d < args.dim) {
      out[d] = saturate_to_half(held[i] * scale * weight[d], count);
    }
  }
  for (uint d = thread_index + NORM_HELD * 256; d < args.dim; d += 256) {
    out[d] = saturate_to_half(in[d] * scale * weight[d], count);
  }
  if (thread_index == 0) {
    inv_rms[stream] = scale;
  }
  report_saturated(saturated, count);
}

// One threadgroup a token. Four outputs at a time share the reading of xn.
[[kernel, max_total_threads_per_threadgroup(256)]] void gr_inject(
    constant NormArgs& args [[buffer(0)]], const device float* x [[buffer(1)]],
    const device float* inv_rms [[buffer(2)]], const device float* gamma [[buffer(3)]],
    const device float* w_inject [[buffer(4)]], device float* inject [[buffer(5)]],
    uint token [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float partial[8];
  if (token >= args.n_tokens) {
    return;
  }
  const ulong width = ulong(args.n_streams) * args.dim;
  const device float* in = x + token * width;
  for (uint first = 0; first < args.n_streams; first += 4) {
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    const uint outputs = min(4u, args.n_streams - first);
    for (uint c = 0; c < args.n_streams; ++c) {
      const float scale = inv_rms[ulong(token) * args.n_streams + c];
      for (uint d = thread_index; d < args.dim; d += 256) {
        const ulong at = ulong(c) * args.dim + d;
        const float xn = in[at] * scale * gamma[at];
        for (uint o = 0; o < outputs; ++o) {
          sums[o] = sums[o] + w_inject[(first + o) * width + at] * xn;
        }
      }
    }
    for (uint o = 0; o < outputs; ++o) {
      const float sum = threadgroup_sum(sums[o], lane, simdgroup, partial);
      if (thread_index == 0) {
        inject[ulong(token) * args.n_streams + first + o] = sum;
      }
    }
  }
}

// group.x = chunk of 256 columns, group.y = token.
[[kernel, max_total_threads_per_threadgroup(256)]] void gr_epi_down(constant ElementArgs& args [[buffer(0)]],
                                                                    const device float* lo [[buffer(1)]],
                                                                    device half* loh [[buffer(2)]],
                                                                    device atomic_uint* saturated [[buffer(3)]],
                                                                    uint2 group [[threadgroup_position_in_grid]],
                                                                    uint thread_index [[thread_index_in_threadgroup]]) {
  const uint column = group.x * 256 + thread_index;
  if (group.y >= args.n_rows || column >= args.n_cols) {
    return;
  }
  const ulong at = ulong(group.y) * args.n_cols + column;
  uint count = 0;
  loh[at] = saturate_to_half(silu(lo[at] / args.divisor), count);
  report_saturated(saturated, count);
}

METAL_FUNC half4 silu4(float4 v, float divisor, thread uint& count) {
  return half4(saturate_to_half(silu(v.x / divisor), count), saturate_to_half(silu(v.y / divisor), count),
               saturate_to_half(silu(v.z / divisor), count), saturate_to_half(silu(v.w / divisor), count));
}

// The same bits, over all tokens' columns as one array: x = chunk of 2,048 values.
[[kernel, max_total_threads_per_threadgroup(FLAT_THREADS)]] void gr_epi_down_v4(
    constant ElementArgs& args [[buffer(0)]], const device float* lo [[buffer(1)]], device half* loh [[buffer(2)]],
    device atomic_uint* saturated [[buffer(3)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  const ulong n_values = ulong(args.n_rows) * args.n_cols;
  const ulong first = flat_first(group, thread_index);
  uint count = 0;
  float4 values[FLAT_VECTORS];
  for (uint j = 0; j < FLAT_VECTORS; ++j) {
    values[j] = flat_read(lo, flat_at(first, j), n_values);
  }
  for (uint j = 0; j < FLAT_VECTORS; ++j) {
    flat_write(loh, flat_at(first, j), n_values, silu4(values[j], args.divisor, count));
  }
  report_saturated(saturated, count);
}

// W_up has C * D rows: those of stream c from c * D on. The streams go one after the other, the mean in registers.
template <typename Format, uint M, uint N, uint K, uint S>
[[kernel, max_total_threads_per_threadgroup(S * 32)]] void gemm_hc_up(
    constant HcUpArgs& args [[buffer(0)]], const device half* loh [[buffer(1)]], const device uchar* w [[buffer(2)]],
    const device float* x [[buffer(3)]], const device float* inv_rms [[buffer(4)]],
    const device float* gamma [[buffer(5)]], device float* mixed [[buffer(6)]], device half* mixh [[buffer(7)]],
    device atomic_uint* saturated [[buffer(8)]], uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(K == EXPERTILE_TILE_INNER, "the inner step");
  threadgroup float4 pool[TilePool<half, M, N, S>::words];
  const uint row = group.y * M;
  const uint column = group.x * N;
  if (row >= args.n_tokens || column >= args.dim) {
    return;
  }
  constexpr uint owned = M * N / (S * 32);
  float sum[owned];
  for (uint i = 0; i < owned; ++i) {
    sum[i] = 0.0f;
  }
  const ContiguousRows<half> rows = contiguous_rows(loh, row, args.n_inner, min(M, args.n_tokens - row));
  const uint columns = min(N, args.dim - column);
  for (uint c = 0; c < args.n_streams; ++c) {
    const WeightRows<Format> weights =
        weight_rows<Format>(w, args.weight_row_bytes, ulong(c) * args.dim + column, columns);
    threadgroup const float* gate = multiply_tile<M, N, S>(rows, weights, args.n_inner, thread_index, simdgroup, pool);
    for (uint i = 0; i < owned; ++i) {
      const uint at = thread_index + i * S * 32;
      if (at / N < rows.count && at % N < columns) {
        const ulong stream = ulong(row + at / N) * args.n_streams + c;
        const uint d = column + at % N;
        const float xn = x[stream * args.dim + d] * inv_rms[stream] * gamma[ulong(c) * args.dim + d];
        sum[i] = sum[i] + xn * sigmoid(gate[at]);
      }
    }
  }
  uint count = 0;
  for (uint i = 0; i < owned; ++i) {
    const uint at = thread_index + i * S * 32;
    if (at / N < rows.count && at % N < columns) {
      const ulong out = ulong(row + at / N) * args.dim + column + at % N;
      const float mean = sum[i] / float(args.n_streams);
      mixed[out] = mean;
      mixh[out] = saturate_to_half(mean, count);
    }
  }
  report_saturated(saturated, count);
}

EXPERTILE_EACH_FORMAT(EXPERTILE_TILE_KERNEL, gemm_hc_up)
