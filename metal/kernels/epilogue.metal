// epilogue.metal: what follows the GEMMs: SwiGLU, the weighted sum of a token's rows, the write into the streams.
//
//   h[r, :]      = half(silu(g[r, :]) * u[r, :])                           act_f16 (plan rows), swiglu_h (tokens)
//   routed[t, d] = sum over slots, in order, of sw[pos] * y[pos, d]        mm_combine
//   out          = routed + sigmoid(sgv) * ys
//   x[t, c, d]  += 2 * sigmoid(inject[t, c] / C) * out[d]                  moe_out
//
//   act_f16          g, u fp32 [max_rows, F] of gate and up -> h half [max_rows, F], for the grouped down GEMM
//   swiglu_h         gsh, ush fp32 [T, Fs] -> hh half [T, Fs], for the shared down GEMM
//   mm_combine       y fp32 [max_rows, D] of down, pos, sw of the plan -> routed fp32 [T, D]
//   moe_out          routed, ys of shared down, sgv of the shared gate, inject -> x fp32 [T, C, D]
//   moe_out_combine  mm_combine and moe_out in one: routed is never stored
//
// A variant _v4 takes four columns a thread, with the same bits. Padding rows of g and u are garbage: never counted,
// and zero in h. Grids: act_f16 one threadgroup a row; swiglu_h_v4 x = chunk of 2,048 values of all tokens; else
// x = chunk of 256 columns (_v4: 640), y = token.
#include <metal_stdlib>

#include "args.h"
#include "numeric.h"

using namespace metal;

// Of the _v4 kernels: the model's 640 and 2,560 columns leave no thread without work.
#define VECTOR_THREADS 160

METAL_FUNC half4 swiglu4(float4 g, float4 u, thread uint& count) {
  return half4(saturate_to_half(silu(g.x) * u.x, count), saturate_to_half(silu(g.y) * u.y, count),
               saturate_to_half(silu(g.z) * u.z, count), saturate_to_half(silu(g.w) * u.w, count));
}

[[kernel, max_total_threads_per_threadgroup(256)]] void act_f16(
    constant ElementArgs& args [[buffer(0)]], const device uint* meta [[buffer(1)]],
    const device int* stok [[buffer(2)]], const device float* g [[buffer(3)]], const device float* u [[buffer(4)]],
    device half* h [[buffer(5)]], device atomic_uint* saturated [[buffer(6)]],
    uint row [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  if (row >= meta[EXPERTILE_META_ROWS]) {
    return;
  }
  const bool padding = stok[row] < 0;
  const ulong first = ulong(row) * args.n_cols;
  uint count = 0;
  for (uint column = thread_index; column < args.n_cols; column += 256) {
    const ulong at = first + column;
    h[at] = padding ? half(0.0f) : saturate_to_half(silu(g[at]) * u[at], count);
  }
  report_saturated(saturated, count);
}

// Rows of a length that is no multiple of four are not aligned for vectors: those go column by column.
[[kernel, max_total_threads_per_threadgroup(VECTOR_THREADS)]] void act_f16_v4(
    constant ElementArgs& args [[buffer(0)]], const device uint* meta [[buffer(1)]],
    const device int* stok [[buffer(2)]], const device float* g [[buffer(3)]], const device float* u [[buffer(4)]],
    device half* h [[buffer(5)]], device atomic_uint* saturated [[buffer(6)]],
    uint row [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  if (row >= meta[EXPERTILE_META_ROWS]) {
    return;
  }
  const bool padding = stok[row] < 0;
  const ulong first = ulong(row) * args.n_cols;
  uint count = 0;
  if (args.n_cols % 4 == 0) {
    const device float4* g4 = reinterpret_cast<const device float4*>(g + first);
    const device float4* u4 = reinterpret_cast<const device float4*>(u + first);
    device half4* h4 = reinterpret_cast<device half4*>(h + first);
    for (uint i = thread_index; i < args.n_cols / 4; i += VECTOR_THREADS) {
      h4[i] = padding ? half4(half(0.0f)) : swiglu4(g4[i], u4[i], count);
    }
  } else {
    for (uint column = thread_index; column < args.n_cols; column += VECTOR_THREADS) {
      const ulong at = first + column;
      h[at] = padding ? half(0.0f) : saturate_to_half(silu(g[at]) * u[at], count);
    }
  }
  report_saturated(saturated, count);
}

[[kernel, max_total_threads_per_threadgroup(256)]] void swiglu_h(
    constant ElementArgs& args [[buffer(0)]], const device float* gsh [[buffer(1)]],
    const device float* ush [[buffer(2)]], device half* hh [[buffer(3)]], device atomic_uint* saturated [[buffer(4)]],
    uint2 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  const uint column = group.x * 256 + thread_index;
  if (group.y >= args.n_rows || column >= args.n_cols) {
    return;
  }
  const ulong at = ulong(group.y) * args.n_cols + column;
  uint count = 0;
  hh[at] = saturate_to_half(silu(gsh[at]) * ush[at], count);
  report_saturated(saturated, count);
}

// Over all tokens' columns as one array: two vectors a thread are on their way at once, and no row ends a threadgroup.
[[kernel, max_total_threads_per_threadgroup(FLAT_THREADS)]] void swiglu_h_v4(
    constant ElementArgs& args [[buffer(0)]], const device float* gsh [[buffer(1)]],
    const device float* ush [[buffer(2)]], device half* hh [[buffer(3)]], device atomic_uint* saturated [[buffer(4)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  const ulong n_values = ulong(args.n_rows) * args.n_cols;
  const ulong first = flat_first(group, thread_index);
  uint count = 0;
  float4 gates[FLAT_VECTORS];
  float4 ups[FLAT_VECTORS];
  for (uint j = 0; j < FLAT_VECTORS; ++j) {
    gates[j] = flat_read(gsh, flat_at(first, j), n_values);
    ups[j] = flat_read(ush, flat_at(first, j), n_values);
  }
  for (uint j = 0; j < FLAT_VECTORS; ++j) {
    flat_write(hh, flat_at(first, j), n_values, swiglu4(gates[j], ups[j], count));
  }
  report_saturated(saturated, count);
}

// One column of the weighted sum of a token's rows. `slots` and `y` begin at the token's first slot and the column.
METAL_FUNC float combine_column(const device int* slots, uint top_k, const device float* sw, const device float* y,
                                uint dim) {
  float sum = 0.0f;
  for (uint slot = 0; slot < top_k; ++slot) {
    const int row = slots[slot];
    if (row >= 0) {
      sum = sum + sw[row] * y[ulong(row) * dim];
    }
  }
  return sum;
}

// x [C, D] from the column on: each stream takes its share of `out`.
METAL_FUNC void write_streams(float out, const device float* inject, uint n_streams, uint dim, device float* x) {
  for (uint c = 0; c < n_streams; ++c) {
    device float* at = x + ulong(c) * dim;
    *at = *at + 2.0f * sigmoid(inject[c] / float(n_streams)) * out;
  }
}

[[kernel, max_total_threads_per_threadgroup(256)]] void mm_combine(
    constant CombineArgs& args [[buffer(0)]], const device int* pos [[buffer(1)]], const device float* sw [[buffer(2)]],
    const device float* y [[buffer(3)]], device float* routed [[buffer(4)]],
    uint2 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  const uint column = group.x * 256 + thread_index;
  if (group.y >= args.n_tokens || column >= args.dim) {
    return;
  }
  routed[ulong(group.y) * args.dim + column] =
      combine_column(pos + ulong(group.y) * args.top_k, args.top_k, sw, y + column, args.dim);
}

[[kernel, max_total_threads_per_threadgroup(256)]] void moe_out(
    constant OutArgs& args [[buffer(0)]], const device float* routed [[buffer(1)]],
    const device float* ys [[buffer(2)]], const device float* sgv [[buffer(3)]],
    const device float* inject [[buffer(4)]], device float* x [[buffer(5)]],
    uint2 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  const uint column = group.x * 256 + thread_index;
  const ulong token = group.y;
  if (token >= args.n_tokens || column >= args.dim) {
    return;
  }
  const ulong at = token * args.dim + column;
  const float out = routed[at] + sigmoid(sgv[token]) * ys[at];
  write_streams(out, inject + token * args.n_streams, args.n_streams, args.dim,
                x + token * args.n_streams * args.dim + column);
}

[[kernel, max_total_threads_per_threadgroup(256)]] void moe_out_combine(
    constant CombineOutArgs& args [[buffer(0)]], const device int* pos [[buffer(1)]],
    const device float* sw [[buffer(2)]], const device float* y [[buffer(3)]], const device float* ys [[buffer(4)]],
    const device float* sgv [[buffer(5)]], const device float* inject [[buffer(6)]], device float* x [[buffer(7)]],
    uint2 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  const uint column = group.x * 256 + thread_index;
  const ulong token = group.y;
  if (token >= args.n_tokens || column >= args.dim) {
    return;
  }
  const float routed = combine_column(pos + token * args.top_k, args.top_k, sw, y + column, args.dim);
  const float out = routed + sigmoid(sgv[token]) * ys[token * args.dim + column];
  write_streams(out, inject + token * args.n_streams, args.n_streams, args.dim,
                x + token * args.n_streams * args.dim + column);
}

// Four neighbouring columns of the weighted sum. Five rows are on their way at once.
METAL_FUNC float4 combine_columns(const device int* slots, uint top_k, const device float* sw, const device float* y,
                                  uint dim) {
  float4 sum = float4(0.0f);
  for (uint first = 0; first < top_k; first += 5) {
    int rows[5];
    float weights[5];
    float4 values[5];
    for (uint j = 0; j < 5; ++j) {
      rows[j] = first + j < top_k ? slots[first + j] : -1;
    }
    for (uint j = 0; j < 5; ++j) {
      weights[j] = rows[j] >= 0 ? sw[rows[j]] : 0.0f;
      values[j] = float4(0.0f);
      if (rows[j] >= 0) {
        values[j] = *reinterpret_cast<const device float4*>(y + ulong(uint(rows[j])) * dim);
      }
    }
    for (uint j = 0; j < 5; ++j) {
      if (rows[j] >= 0) {
        sum = sum + weights[j] * values[j];
      }
    }
  }
  return sum;
}

// Four neighbouring columns of four streams from stream c on.
METAL_FUNC void read_streams(const device float* x, uint c, uint n_streams, uint dim, thread float4* values) {
  for (uint j = 0; j < 4; ++j) {
    if (c + j < n_streams) {
      values[j] = *reinterpret_cast<const device float4*>(x + ulong(c + j) * dim);
    }
  }
}

// write_streams for four columns; `values` holds those of the first four streams, read before `out` was known.
METAL_FUNC void write_stream_columns(float4 out, const device float* inject, uint n_streams, uint dim,
                                     thread float4* values, device float* x) {
  for (uint c = 0; c < n_streams; c += 4) {
    if (c > 0) {
      read_streams(x, c, n_streams, dim, values);
    }
    for (uint j = 0; j < 4; ++j) {
      if (c + j < n_streams) {
        *reinterpret_cast<device float4*>(x + ulong(c + j) * dim) =
            values[j] + 2.0f * sigmoid(inject[c + j] / float(n_streams)) * out;
      }
    }
  }
}

[[kernel, max_total_threads_per_threadgroup(VECTOR_THREADS)]] void mm_combine_v4(
    constant CombineArgs& args [[buffer(0)]], const device int* pos [[buffer(1)]], const device float* sw [[buffer(2)]],
    const device float* y [[buffer(3)]], device float* routed [[buffer(4)]],
    uint2 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  const uint column = (group.x * VECTOR_THREADS + thread_index) * 4;
  if (group.y >= args.n_tokens || column >= args.dim) {
    return;
  }
  const device int* slots = pos + ulong(group.y) * args.top_k;
  device float* to = routed + ulong(group.y) * args.dim + column;
  if (args.dim % 4 == 0) {
    *reinterpret_cast<device float4*>(to) = combine_columns(slots, args.top_k, sw, y + column, args.dim);
  } else {
    for (uint j = 0; j < min(4u, args.dim - column); ++j) {
      to[j] = combine_column(slots, args.top_k, sw, y + column + j, args.dim);
    }
  }
}

[[kernel, max_total_threads_per_threadgroup(VECTOR_THREADS)]] void moe_out_v4(
    constant OutArgs& args [[buffer(0)]], const device float* routed [[buffer(1)]],
    const device float* ys [[buffer(2)]], const device float* sgv [[buffer(3)]],
    const device float* inject [[buffer(4)]], device float* x [[buffer(5)]],
    uint2 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  const uint column = (group.x * VECTOR_THREADS + thread_index) * 4;
  const ulong token = group.y;
  if (token >= args.n_tokens || column >= args.dim) {
    return;
  }
  const ulong at = token * args.dim + column;
  const device float* token_inject = inject + token * args.n_streams;
  device float* streams = x + token * args.n_streams * args.dim + column;
  if (args.dim % 4 == 0) {
    float4 values[4];
    read_streams(streams, 0, args.n_streams, args.dim, values);
    const float4 out = *reinterpret_cast<const device float4*>(routed + at) +
                       sigmoid(sgv[token]) * *reinterpret_cast<const device float4*>(ys + at);
    write_stream_columns(out, token_inject, args.n_streams, args.dim, values, streams);
  } else {
    for (uint j = 0; j < min(4u, args.dim - column); ++j) {
      const float out = routed[at + j] + sigmoid(sgv[token]) * ys[at + j];
      write_streams(out, token_inject, args.n_streams, args.dim, streams + j);
    }
  }
}

[[kernel, max_total_threads_per_threadgroup(VECTOR_THREADS)]] void moe_out_combine_v4(
    constant CombineOutArgs& args [[buffer(0)]], const device int* pos [[buffer(1)]],
    const device float* sw [[buffer(2)]], const device float* y [[buffer(3)]], const device float* ys [[buffer(4)]],
    const device float* sgv [[buffer(5)]], const device float* inject [[buffer(6)]], device float* x [[buffer(7)]],
    uint2 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  const uint column = (group.x * VECTOR_THREADS + thread_index) * 4;
  const ulong token = group.y;
  if (token >= args.n_tokens || column >= args.dim) {
    return;
  }
  const ulong at = token * args.dim + column;
  const device int* slots = pos + token * args.top_k;
  const device float* token_inject = inject + token * args.n_streams;
  device float* streams = x + token * args.n_streams * args.dim + column;
  if (args.dim % 4 == 0) {
    float4 values[4];
    read_streams(streams, 0, args.n_streams, args.dim, values);
    const float4 routed = combine_columns(slots, args.top_k, sw, y + column, args.dim);
    const float4 out = routed + sigmoid(sgv[token]) * *reinterpret_cast<const device float4*>(ys + at);
    write_stream_columns(out, token_inject, args.n_streams, args.dim, values, streams);
  } else {
    for (uint j = 0; j < min(4u, args.dim - column); ++j) {
      const float routed = combine_column(slots, args.top_k, sw, y + column + j, args.dim);
      const float out = routed + sigmoid(sgv[token]) * ys[at + j];
      write_streams(out, token_inject, args.n_streams, args.dim, streams + j);
    }
  }
}
