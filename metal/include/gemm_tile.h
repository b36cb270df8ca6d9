// gemm_tile.h: what the GEMM kernels share: where rows come from, staging, the loop over the inner dimension, and the
// tables of formats and tiles that are compiled.
//
//   sums[m][n] = sum over k of rows[m][k] * weights[n][k],  k = 0 .. n_inner - 1
//
// A tile stages 32 values of k at a time: rows as they are, weights decoded in fp32 and rounded once to half. Rows and
// columns behind the tile's real ones, and k behind n_inner, are staged as zero and never read from memory.
#pragma once
#include <metal_stdlib>

#include "args.h"
#include "numeric.h"
#include "quant.h"
#include "tile_mma.h"

using namespace metal;

// An entry of a table of weights by expert.
struct ExpertPointer {
  const device uchar* data;
};
static_assert(sizeof(ExpertPointer) == 8, "ExpertPointer");

// Rows that lie one after the other.
template <typename T>
struct ContiguousRows {
  typedef T Element;
  const device T* first;
  uint stride;
  uint count;
  METAL_FUNC const device T* row(uint r) const { return first + ulong(r) * stride; }
};

// Rows of tokens, found through the plan's row_token: a gather without a copy.
struct TokenRows {
  typedef half Element;
  const device half* tokens;
  const device int* row_token;
  uint stride;
  uint count;
  METAL_FUNC const device half* row(uint r) const { return tokens + ulong(uint(row_token[r])) * stride; }
};

// Rows of a quantized matrix from the tile's first column on.
template <typename Format>
struct WeightRows {
  const device uchar* first;
  ulong row_bytes;
  uint count;
};

template <typename Format>
METAL_FUNC WeightRows<Format> weight_rows(const device uchar* matrix, ulong row_bytes, ulong first, uint count) {
  WeightRows<Format> rows;
  rows.first = matrix + first * row_bytes;
  rows.row_bytes = row_bytes;
  rows.count = count;
  return rows;
}

template <typename T>
METAL_FUNC ContiguousRows<T> contiguous_rows(const device T* matrix, ulong first, uint stride, uint count) {
  ContiguousRows<T> rows;
  rows.first = matrix + first * stride;
  rows.stride = stride;
  rows.count = count;
  return rows;
}

// Eight neighbouring values; two vectors where the rows are aligned for it.
METAL_FUNC void copy8(const device half* from, bool aligned, threadgroup half* to) {
  if (aligned) {
    const device half4* source = reinterpret_cast<const device half4*>(from);
    threadgroup half4* target = reinterpret_cast<threadgroup half4*>(to);
    target[0] = source[0];
    target[1] = source[1];
  } else {
    for (uint j = 0; j < 8; ++j) {
      to[j] = from[j];
    }
  }
}

METAL_FUNC void copy8(const device float* from, bool aligned, threadgroup float* to) {
  if (aligned) {
    const device float4* source = reinterpret_cast<const device float4*>(from);
    threadgroup float4* target = reinterpret_cast<threadgroup float4*>(to);
    target[0] = source[0];
    target[1] = source[1];
  } else {
    for (uint j = 0; j < 8; ++j) {
      to[j] = from[j];
    }
  }
}

// staged[m][0..31] = rows[m][k .. k+31]
template <uint M, uint S, typename Rows>
METAL_FUNC void stage_rows(thread const Rows& rows, uint k, uint n_inner, uint thread_index,
                           threadgroup typename Rows::Element* staged) {
  typedef typename Rows::Element T;
  for (uint unit = thread_index; unit < M * 4; unit += S * 32) {
    const uint m = unit / 4;
    const uint from = k + 8 * (unit % 4);
    threadgroup T* to = staged + m * EXPERTILE_TILE_STRIDE(T) + 8 * (unit % 4);
    if (m < rows.count && from + 8 <= n_inner) {
      copy8(rows.row(m) + from, n_inner % 4 == 0, to);
    } else {
      for (uint j = 0; j < 8; ++j) {
        to[j] = m < rows.count && from + j < n_inner ? rows.row(m)[from + j] : T(0.0f);
      }
    }
  }
}

// staged[n][0..31] = weights[n][k .. k+31], rounded to T
template <uint N, uint S, typename T, typename Format>
METAL_FUNC void stage_weights(thread const WeightRows<Format>& weights, uint k, uint n_inner, uint thread_index,
                              threadgroup T* staged) {
  for (uint unit = thread_index; unit < N * 4; unit += S * 32) {
    const uint n = unit / 4;
    float y[8];
    // A column that is not there counts as a row without weights: zeros.
    RowReader<Format>::read8(weights.first + min(n, weights.count) * weights.row_bytes, k + 8 * (unit % 4),
                             n < weights.count ? n_inner : 0, y);
    for (uint j = 0; j < 8; ++j) {
      staged[n * EXPERTILE_TILE_STRIDE(T) + 8 * (unit % 4) + j] = T(y[j]);
    }
  }
}

// Threadgroup memory of a kernel, as float4: the staged operands and, when they are done with, the sums.
template <typename T, uint M, uint N>
struct TilePool {
  static constant constexpr uint staging = (M + N) * EXPERTILE_TILE_STRIDE(T) * sizeof(T), sums = M * N * 4;
  static constant constexpr uint words = (staging > sums ? staging : sums) / 16;
  static_assert(words * 16 <= 32768, "a threadgroup has 32 KB");
};

// pool [M][N] fp32 = the product; elements of missing rows and columns are 0. Every thread calls, uniformly.
template <uint M, uint N, uint S, typename Rows, typename Format>
METAL_FUNC threadgroup const float* multiply_tile(thread const Rows& rows, thread const WeightRows<Format>& weights,
                                                  uint n_inner, uint thread_index, uint simdgroup,
                                                  threadgroup float4* pool) {
  typedef typename Rows::Element T;
  threadgroup T* a = reinterpret_cast<threadgroup T*>(pool);
  threadgroup T* b = a + M * EXPERTILE_TILE_STRIDE(T);
  TileAccumulator<T, M, N, S> sums;
  sums.zero();
  for (uint k = 0; k < n_inner; k += EXPERTILE_TILE_INNER) {
    threadgroup_barrier(mem_flags::mem_threadgroup);  // what lay in the pool has been read
    stage_rows<M, S>(rows, k, n_inner, thread_index, a);
    stage_weights<N, S>(weights, k, n_inner, thread_index, b);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sums.multiply(a, b, simdgroup);
  }
  threadgroup float* c = reinterpret_cast<threadgroup float*>(pool);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  sums.store(c, simdgroup);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return c;
}

// The tiles M,N,K,S of every GEMM, and the formats. each(function, Format, suffix, M, N, K, S).
#define EXPERTILE_EACH_TILE(each, function, Format, suffix)                                   \
  each(function, Format, suffix, 16, 32, 32, 4) each(function, Format, suffix, 16, 64, 32, 2) \
      each(function, Format, suffix, 32, 64, 32, 4) each(function, Format, suffix, 64, 64, 32, 4)

#define EXPERTILE_EACH_QUANTIZED(each, function)        \
  EXPERTILE_EACH_TILE(each, function, Q4_0, q4_0)       \
  EXPERTILE_EACH_TILE(each, function, Q5_0, q5_0)       \
  EXPERTILE_EACH_TILE(each, function, Q5_1, q5_1)       \
  EXPERTILE_EACH_TILE(each, function, Q8_0, q8_0)       \
  EXPERTILE_EACH_TILE(each, function, Q2_0, q2_0)       \
  EXPERTILE_EACH_TILE(each, function, Q2_K, q2_k)       \
  EXPERTILE_EACH_TILE(each, function, Q3_K, q3_k)       \
  EXPERTILE_EACH_TILE(each, function, Q4_K, q4_k)       \
  EXPERTILE_EACH_TILE(each, function, Q5_K, q5_k)       \
  EXPERTILE_EACH_TILE(each, function, Q6_K, q6_k)       \
  EXPERTILE_EACH_TILE(each, function, IQ2_XXS, iq2_xxs) \
  EXPERTILE_EACH_TILE(each, function, IQ2_XS, iq2_xs)   \
  EXPERTILE_EACH_TILE(each, function, IQ2_S, iq2_s)     \
  EXPERTILE_EACH_TILE(each, function, IQ3_XXS, iq3_xxs) \
  EXPERTILE_EACH_TILE(each, function, IQ3_S, iq3_s)     \
  EXPERTILE_EACH_TILE(each, function, IQ4_NL, iq4_nl)   \
  EXPERTILE_EACH_TILE(each, function, IQ4_XS, iq4_xs)

#define EXPERTILE_EACH_FORMAT(each, function)     \
  EXPERTILE_EACH_TILE(each, function, F32, f32)   \
  EXPERTILE_EACH_TILE(each, function, F16, f16)   \
  EXPERTILE_EACH_TILE(each, function, BF16, bf16) \
  EXPERTILE_EACH_QUANTIZED(each, function)

// function_<suffix>_<M>_<N>_<K>_<S>
#define EXPERTILE_TILE_KERNEL_NAMED(name, function, Format, M, N, K, S) \
  template [[host_name(name)]] [[kernel]] decltype(function<Format, M, N, K, S>) function<Format, M, N, K, S>;
#define EXPERTILE_TILE_KERNEL(function, Format, suffix, M, N, K, S) \
  EXPERTILE_TILE_KERNEL_NAMED(#function "_" #suffix "_" #M "_" #N "_" #K "_" #S, function, Format, M, N, K, S)
