// gemm_tile.h: what the GEMM kernels share: where rows come from, staging, the loop over the inner dimension, and the
// tables of formats and tiles that are compiled.
//
//   sums[m][n] = sum over k of rows[m][k] * weights[n][k],  k = 0 .. n_inner - 1
//
// A tile takes 32 values of k at a time: rows as they are, weights decoded in fp32 and rounded once to half. Rows and
// columns behind the tile's real ones, and k behind n_inner, count as zero and are never read from memory. Where the
// unit gains by it (EXPERTILE_TILE_AHEAD), a step's loads are issued before the products of the step before, so that
// they are under way meanwhile.
#pragma once
#include <metal_stdlib>

#include "args.h"
#include "numeric.h"
#include "quant.h"
#include "quant_four.h"
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
  // Behind the last row lies no other: callers read nothing there.
  METAL_FUNC const device uchar* row(uint n) const { return first + min(n, count) * row_bytes; }
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

// What a thread stages of `count` rows in one step: units of eight k, on their way from memory to the staged operand.
template <typename T, uint count, uint S>
struct StagedUnits {
  static constant constexpr uint units = (count * 4 + S * 32 - 1) / (S * 32);
  typedef vec<T, 4> Four;
  Four values[units][2];

  // Eight neighbouring values; two vectors where the rows are aligned for it.
  static METAL_FUNC void load8(const device T* from, bool aligned, thread Four* to) {
    if (aligned) {
      const device Four* source = reinterpret_cast<const device Four*>(from);
      to[0] = source[0];
      to[1] = source[1];
    } else {
      for (uint j = 0; j < 8; ++j) {
        to[j / 4][j % 4] = from[j];
      }
    }
  }

  // rows[m][k .. k+31]
  template <typename Rows>
  METAL_FUNC void read_rows(thread const Rows& rows, uint k, uint n_inner, uint thread_index) {
    for (uint i = 0; i < units; ++i) {
      const uint unit = thread_index + i * S * 32;
      const uint m = unit / 4;
      const uint from = k + 8 * (unit % 4);
      if (m < rows.count && from + 8 <= n_inner) {
        load8(rows.row(m) + from, n_inner % 4 == 0, values[i]);
      } else {
        for (uint j = 0; j < 8; ++j) {
          values[i][j / 4][j % 4] = m < rows.count && from + j < n_inner ? rows.row(m)[from + j] : T(0.0f);
        }
      }
    }
  }

  // weights[n][k .. k+31], rounded to T. A column that is not there counts as a row without weights: zeros.
  template <typename Format>
  METAL_FUNC void read_weights(thread const WeightRows<Format>& weights, uint k, uint n_inner, uint thread_index) {
    for (uint i = 0; i < units; ++i) {
      const uint unit = thread_index + i * S * 32;
      const uint n = unit / 4;
      float y[8];
      RowReader<Format>::read8(weights.row(n), k + 8 * (unit % 4), n < weights.count ? n_inner : 0, y);
      for (uint j = 0; j < 8; ++j) {
        values[i][j / 4][j % 4] = T(y[j]);
      }
    }
  }

  METAL_FUNC void write(threadgroup T* staged, uint thread_index) {
    for (uint i = 0; i < units; ++i) {
      const uint unit = thread_index + i * S * 32;
      if (unit < count * 4) {
        threadgroup Four* to =
            reinterpret_cast<threadgroup Four*>(staged + unit / 4 * EXPERTILE_TILE_STRIDE(T) + 8 * (unit % 4));
        to[0] = values[i][0];
        to[1] = values[i][1];
      }
    }
  }
};

// The right operand of a tile, step by step: staged beside the rows, or read where the unit wants it.
template <typename T, uint M, uint N, uint S, typename Format, bool in_registers>
struct RightOperand {
  StagedUnits<T, N, S> units;

  METAL_FUNC void read(thread const WeightRows<Format>& weights, uint k, uint n_inner, uint thread_index) {
    units.read_weights(weights, k, n_inner, thread_index);
  }
  METAL_FUNC void write(threadgroup T* staged, uint thread_index) { units.write(staged, thread_index); }
  METAL_FUNC void multiply(threadgroup T* a, threadgroup T* b, uint simdgroup,
                           thread TileAccumulator<T, M, N, S>& sums) {
    sums.multiply(a, b, simdgroup);
  }
};

template <typename T, uint M, uint N, uint S, typename Format>
struct RightOperand<T, M, N, S, Format, true> {
  WeightRows<Format> weights;
  uint n_inner;
  uint next;
  uint k;

  METAL_FUNC void read(thread const WeightRows<Format>& rows, uint step, uint inner, uint) {
    weights = rows;
    n_inner = inner;
    next = step;
  }
  METAL_FUNC void write(threadgroup T*, uint) { k = next; }
  METAL_FUNC void multiply(threadgroup T* a, threadgroup T*, uint simdgroup, thread TileAccumulator<T, M, N, S>& sums) {
    sums.multiply(a, *this, simdgroup);
  }
  // Weights from..from+3 of the step, from a multiple of 4, of column n.
  METAL_FUNC vec<T, 4> read4(uint n, uint from) const {
    float y[4];
    FourReader<Format>::read4(weights.row(n), k + from, n < weights.count ? n_inner : 0, y);
    vec<T, 4> four;
    for (uint j = 0; j < 4; ++j) {
      four[j] = T(y[j]);
    }
    return four;
  }
};

// Threadgroup memory of a kernel, as float4: the staged operands, `products` of them right ones, and, when they are
// done with, the sums.
template <typename T, uint M, uint N, uint S, uint products = 1>
struct TilePool {
  static constant constexpr uint rows = M + (TileAccumulator<T, M, N, S>::right_in_registers ? 0 : products * N);
  static constant constexpr uint staging = rows * EXPERTILE_TILE_STRIDE(T) * sizeof(T), sums = M * N * 4;
  static constant constexpr uint words = (staging > sums ? staging : sums) / 16;
  static_assert(words * 16 <= 32768, "a threadgroup has 32 KB");
};

// pool [M][N] fp32 = the sums.
template <typename T, uint M, uint N, uint S>
METAL_FUNC threadgroup const float* store_sums(thread TileAccumulator<T, M, N, S>& sums, uint simdgroup,
                                               threadgroup float4* pool) {
  threadgroup float* c = reinterpret_cast<threadgroup float*>(pool);
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the operands have been read
  sums.store(c, simdgroup);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return c;
}

// pool [M][N] fp32 = the product; elements of missing rows and columns are 0. Every thread calls, uniformly.
template <uint M, uint N, uint S, typename Rows, typename Format>
METAL_FUNC threadgroup const float* multiply_tile(thread const Rows& rows, thread const WeightRows<Format>& weights,
                                                  uint n_inner, uint thread_index, uint simdgroup,
                                                  threadgroup float4* pool) {
  typedef typename Rows::Element T;
  typedef TileAccumulator<T, M, N, S> Sums;
  threadgroup T* a = reinterpret_cast<threadgroup T*>(pool);
  threadgroup T* b = a + M * EXPERTILE_TILE_STRIDE(T);
  Sums sums;
  StagedUnits<T, M, S> left;
  RightOperand<T, M, N, S, Format, Sums::right_in_registers> right;
  sums.zero();
  for (uint k = 0; k < n_inner; k += EXPERTILE_TILE_INNER) {
    if (k == 0 || !EXPERTILE_TILE_AHEAD) {
      left.read_rows(rows, k, n_inner, thread_index);
      right.read(weights, k, n_inner, thread_index);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // what lay in the pool has been read
    left.write(a, thread_index);
    right.write(b, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (EXPERTILE_TILE_AHEAD && k + EXPERTILE_TILE_INNER < n_inner) {
      left.read_rows(rows, k + EXPERTILE_TILE_INNER, n_inner, thread_index);
      right.read(weights, k + EXPERTILE_TILE_INNER, n_inner, thread_index);
    }
    right.multiply(a, b, simdgroup, sums);
  }
  return store_sums(sums, simdgroup, pool);
}

// pool [M][N] fp32 = function.of(product with the first weights, product with the second), element by element: the rows
// are staged once for both, and the function works on the accumulators.
template <uint M, uint N, uint S, typename Rows, typename Format, typename Function>
METAL_FUNC threadgroup const float* multiply_pair(thread const Rows& rows, thread const WeightRows<Format>& first,
                                                  thread const WeightRows<Format>& second,
                                                  thread const Function& function, uint n_inner, uint thread_index,
                                                  uint simdgroup, threadgroup float4* pool) {
  typedef typename Rows::Element T;
  typedef TileAccumulator<T, M, N, S> Sums;
  threadgroup T* a = reinterpret_cast<threadgroup T*>(pool);
  threadgroup T* b = a + M * EXPERTILE_TILE_STRIDE(T);
  threadgroup T* c = b + N * EXPERTILE_TILE_STRIDE(T);
  Sums sums, others;
  StagedUnits<T, M, S> left;
  RightOperand<T, M, N, S, Format, Sums::right_in_registers> right, other;
  sums.zero();
  others.zero();
  for (uint k = 0; k < n_inner; k += EXPERTILE_TILE_INNER) {
    if (k == 0 || !EXPERTILE_TILE_AHEAD) {
      left.read_rows(rows, k, n_inner, thread_index);
      right.read(first, k, n_inner, thread_index);
      other.read(second, k, n_inner, thread_index);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // what lay in the pool has been read
    left.write(a, thread_index);
    right.write(b, thread_index);
    other.write(c, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (EXPERTILE_TILE_AHEAD && k + EXPERTILE_TILE_INNER < n_inner) {
      left.read_rows(rows, k + EXPERTILE_TILE_INNER, n_inner, thread_index);
      right.read(first, k + EXPERTILE_TILE_INNER, n_inner, thread_index);
      other.read(second, k + EXPERTILE_TILE_INNER, n_inner, thread_index);
    }
    right.multiply(a, b, simdgroup, sums);
    other.multiply(a, c, simdgroup, others);
  }
  sums.combine(others, function);
  return store_sums(sums, simdgroup, pool);
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
