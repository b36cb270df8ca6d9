// gemm.metal: the matrix products on quantized weights.
//
//   y[r, n] = scale * sum over k of half(w[n, k]) * xh[r, k]      products and sums fp32
//   h[r, n] = half(silu(g[r, n]) * u[r, n])                       the _swiglu kernels: g and u are two such products
//
//   kernel                    rows                         weights                   from, to
//   gemm_dense_<fmt>          xh [n_rows, n_inner] half    w, n_cols rows            norms, swiglu -> hyper, epilogue
//   gemm_dense_fp32           x [n_rows, n_inner] fp32     w fp32, used as fp32      mixed -> route_topk, moe_out
//   gemm_grouped_<fmt>        xh [max_rows, n_inner] half  table[expert]             mm_gather_h, act_f16 -> epilogue
//   ..._gatherless            mixh [T, n_inner], stok      table[expert]             gemm_hc_up, the plan -> act_f16
//   gemm_swiglu_f16_<fmt>     xh [n_rows, n_inner] half    w_gate, w_up              mixh -> shared down (hh)
//   gemm_grouped_swiglu_<fmt> xh [max_rows, n_inner] half  gate_table, up_table      mm_gather_h -> grouped down
//
// Names end in _<M>_<N>_<K>_<S>. Grid: x = column tile of N, y = row tile of M (dense) or the plan's tile (grouped).
// A grouped kernel leaves the padding rows of its output as they were, and never reads those of its input.
#include "gemm_tile.h"

// y [.., n_cols] gets the tile's real part.
template <uint M, uint N, uint S>
METAL_FUNC void write_scaled(threadgroup const float* sums, float scale, uint rows, uint columns, uint thread_index,
                             device float* y, uint n_cols) {
  for (uint i = thread_index; i < M * N; i += S * 32) {
    if (i / N < rows && i % N < columns) {
      y[ulong(i / N) * n_cols + i % N] = scale * sums[i];
    }
  }
}

struct Swiglu {
  float gate_scale;
  float up_scale;
  METAL_FUNC float of(float gate, float up) const { return silu(gate_scale * gate) * (up_scale * up); }
};

// h gets the tile's real part of silu(gate) * up.
template <uint M, uint N, uint S, typename Format>
METAL_FUNC void write_swiglu(thread const ContiguousRows<half>& rows, thread const WeightRows<Format>& gate,
                             thread const WeightRows<Format>& up, thread const Swiglu& swiglu, uint n_inner,
                             uint thread_index, uint simdgroup, threadgroup float4* pool, device half* h, uint n_cols,
                             device atomic_uint* saturated) {
  threadgroup const float* values =
      multiply_pair<M, N, S>(rows, gate, up, swiglu, n_inner, thread_index, simdgroup, pool);
  uint count = 0;
  for (uint i = thread_index; i < M * N; i += S * 32) {
    if (i / N < rows.count && i % N < up.count) {
      h[ulong(i / N) * n_cols + i % N] = saturate_to_half(values[i], count);
    }
  }
  report_saturated(saturated, count);
}

template <typename Format, uint M, uint N, uint K, uint S>
[[kernel, max_total_threads_per_threadgroup(S * 32)]] void gemm_dense(
    constant GemmArgs& args [[buffer(0)]], const device half* xh [[buffer(1)]], const device uchar* w [[buffer(2)]],
    device float* y [[buffer(3)]], uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(K == EXPERTILE_TILE_INNER, "the inner step");
  threadgroup float4 pool[TilePool<half, M, N, S>::words];
  const uint row = group.y * M;
  const uint column = group.x * N;
  if (row >= args.n_rows || column >= args.n_cols) {
    return;
  }
  const ContiguousRows<half> rows = contiguous_rows(xh, row, args.n_inner, min(M, args.n_rows - row));
  const WeightRows<Format> weights =
      weight_rows<Format>(w, args.weight_row_bytes, column, min(N, args.n_cols - column));
  threadgroup const float* sums = multiply_tile<M, N, S>(rows, weights, args.n_inner, thread_index, simdgroup, pool);
  write_scaled<M, N, S>(sums, args.scale, rows.count, weights.count, thread_index,
                        y + ulong(row) * args.n_cols + column, args.n_cols);
}

// fp32 on both sides: what the router and the shared expert's gate are computed with.
template <uint M, uint N, uint K, uint S>
[[kernel, max_total_threads_per_threadgroup(S * 32)]] void gemm_dense_fp32(
    constant GemmArgs& args [[buffer(0)]], const device float* x [[buffer(1)]], const device uchar* w [[buffer(2)]],
    device float* y [[buffer(3)]], uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(K == EXPERTILE_TILE_INNER, "the inner step");
  threadgroup float4 pool[TilePool<float, M, N, S>::words];
  const uint row = group.y * M;
  const uint column = group.x * N;
  if (row >= args.n_rows || column >= args.n_cols) {
    return;
  }
  const ContiguousRows<float> rows = contiguous_rows(x, row, args.n_inner, min(M, args.n_rows - row));
  const WeightRows<F32> weights = weight_rows<F32>(w, args.weight_row_bytes, column, min(N, args.n_cols - column));
  threadgroup const float* sums = multiply_tile<M, N, S>(rows, weights, args.n_inner, thread_index, simdgroup, pool);
  write_scaled<M, N, S>(sums, args.scale, rows.count, weights.count, thread_index,
                        y + ulong(row) * args.n_cols + column, args.n_cols);
}

template <typename Format, uint M, uint N, uint K, uint S>
[[kernel, max_total_threads_per_threadgroup(S * 32)]] void gemm_grouped(
    constant GemmArgs& args [[buffer(0)]], const device half* xh [[buffer(1)]],
    const device ExpertPointer* table [[buffer(2)]], const device float* expert_scale [[buffer(3)]],
    const device uint4* tiles [[buffer(4)]], const device uint* meta [[buffer(5)]], device float* y [[buffer(6)]],
    uint2 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(K == EXPERTILE_TILE_INNER, "the inner step");
  threadgroup float4 pool[TilePool<half, M, N, S>::words];
  const uint column = group.x * N;
  if (group.y >= meta[EXPERTILE_META_TILES] || column >= args.n_cols) {
    return;
  }
  const uint4 tile = tiles[group.y];  // expert, first row, real rows
  const ContiguousRows<half> rows = contiguous_rows(xh, tile.y, args.n_inner, min(M, tile.z));
  const WeightRows<Format> weights =
      weight_rows<Format>(table[tile.x].data, args.weight_row_bytes, column, min(N, args.n_cols - column));
  threadgroup const float* sums = multiply_tile<M, N, S>(rows, weights, args.n_inner, thread_index, simdgroup, pool);
  write_scaled<M, N, S>(sums, expert_scale[tile.x], rows.count, weights.count, thread_index,
                        y + ulong(tile.y) * args.n_cols + column, args.n_cols);
}

// gemm_grouped on the tokens' rows as they lie: no gathered copy is made or read.
template <typename Format, uint M, uint N, uint K, uint S>
[[kernel, max_total_threads_per_threadgroup(S * 32)]] void gemm_grouped_gatherless(
    constant GemmArgs& args [[buffer(0)]], const device half* mixh [[buffer(1)]], const device int* stok [[buffer(2)]],
    const device ExpertPointer* table [[buffer(3)]], const device float* expert_scale [[buffer(4)]],
    const device uint4* tiles [[buffer(5)]], const device uint* meta [[buffer(6)]], device float* y [[buffer(7)]],
    uint2 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(K == EXPERTILE_TILE_INNER, "the inner step");
  threadgroup float4 pool[TilePool<half, M, N, S>::words];
  const uint column = group.x * N;
  if (group.y >= meta[EXPERTILE_META_TILES] || column >= args.n_cols) {
    return;
  }
  const uint4 tile = tiles[group.y];
  TokenRows rows;
  rows.tokens = mixh;
  rows.row_token = stok + tile.y;
  rows.stride = args.n_inner;
  rows.count = min(M, tile.z);
  const WeightRows<Format> weights =
      weight_rows<Format>(table[tile.x].data, args.weight_row_bytes, column, min(N, args.n_cols - column));
  threadgroup const float* sums = multiply_tile<M, N, S>(rows, weights, args.n_inner, thread_index, simdgroup, pool);
  write_scaled<M, N, S>(sums, expert_scale[tile.x], rows.count, weights.count, thread_index,
                        y + ulong(tile.y) * args.n_cols + column, args.n_cols);
}

template <typename Format, uint M, uint N, uint K, uint S>
[[kernel, max_total_threads_per_threadgroup(S * 32)]] void gemm_swiglu_f16(
    constant GemmSwigluArgs& args [[buffer(0)]], const device half* xh [[buffer(1)]],
    const device uchar* w_gate [[buffer(2)]], const device uchar* w_up [[buffer(3)]], device half* hh [[buffer(4)]],
    device atomic_uint* saturated [[buffer(5)]], uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(K == EXPERTILE_TILE_INNER, "the inner step");
  threadgroup float4 pool[TilePool<half, M, N, S, 2>::words];
  const uint row = group.y * M;
  const uint column = group.x * N;
  if (row >= args.n_rows || column >= args.n_cols) {
    return;
  }
  const uint columns = min(N, args.n_cols - column);
  const ContiguousRows<half> rows = contiguous_rows(xh, row, args.n_inner, min(M, args.n_rows - row));
  const WeightRows<Format> gate = weight_rows<Format>(w_gate, args.weight_row_bytes, column, columns);
  const WeightRows<Format> up = weight_rows<Format>(w_up, args.weight_row_bytes, column, columns);
  Swiglu swiglu;
  swiglu.gate_scale = args.gate_scale;
  swiglu.up_scale = args.up_scale;
  write_swiglu<M, N, S>(rows, gate, up, swiglu, args.n_inner, thread_index, simdgroup, pool,
                        hh + ulong(row) * args.n_cols + column, args.n_cols, saturated);
}

template <typename Format, uint M, uint N, uint K, uint S>
[[kernel, max_total_threads_per_threadgroup(S * 32)]] void gemm_grouped_swiglu(
    constant GemmArgs& args [[buffer(0)]], const device half* xh [[buffer(1)]],
    const device ExpertPointer* gate_table [[buffer(2)]], const device ExpertPointer* up_table [[buffer(3)]],
    const device float* gate_scale [[buffer(4)]], const device float* up_scale [[buffer(5)]],
    const device uint4* tiles [[buffer(6)]], const device uint* meta [[buffer(7)]], device half* h [[buffer(8)]],
    device atomic_uint* saturated [[buffer(9)]], uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(K == EXPERTILE_TILE_INNER, "the inner step");
  threadgroup float4 pool[TilePool<half, M, N, S, 2>::words];
  const uint column = group.x * N;
  if (group.y >= meta[EXPERTILE_META_TILES] || column >= args.n_cols) {
    return;
  }
  const uint4 tile = tiles[group.y];
  const uint columns = min(N, args.n_cols - column);
  const ContiguousRows<half> rows = contiguous_rows(xh, tile.y, args.n_inner, min(M, tile.z));
  const WeightRows<Format> gate = weight_rows<Format>(gate_table[tile.x].data, args.weight_row_bytes, column, columns);
  const WeightRows<Format> up = weight_rows<Format>(up_table[tile.x].data, args.weight_row_bytes, column, columns);
  Swiglu swiglu;
  swiglu.gate_scale = gate_scale[tile.x];
  swiglu.up_scale = up_scale[tile.x];
  write_swiglu<M, N, S>(rows, gate, up, swiglu, args.n_inner, thread_index, simdgroup, pool,
                        h + ulong(tile.y) * args.n_cols + column, args.n_cols, saturated);
}

#define GATHERLESS_KERNEL(function, Format, suffix, M, N, K, S)                                                       \
  EXPERTILE_TILE_KERNEL_NAMED("gemm_grouped_" #suffix "_" #M "_" #N "_" #K "_" #S "_gatherless", function, Format, M, \
                              N, K, S)
#define FP32_KERNEL(function, Format, suffix, M, N, K, S)  \
  template [[host_name("gemm_dense_fp32_" #M "_" #N "_" #K \
                       "_" #S)]] [[kernel]] decltype(function<M, N, K, S>) function<M, N, K, S>;

EXPERTILE_EACH_FORMAT(EXPERTILE_TILE_KERNEL, gemm_dense)
EXPERTILE_EACH_TILE(FP32_KERNEL, gemm_dense_fp32, F32, f32)
EXPERTILE_EACH_FORMAT(EXPERTILE_TILE_KERNEL, gemm_grouped)
EXPERTILE_EACH_QUANTIZED(GATHERLESS_KERNEL, gemm_grouped_gatherless)
EXPERTILE_EACH_FORMAT(EXPERTILE_TILE_KERNEL, gemm_swiglu_f16)
EXPERTILE_EACH_QUANTIZED(EXPERTILE_TILE_KERNEL, gemm_grouped_swiglu)
