// numeric.h: the numeric helpers that kernels share. fp32, in the order written, nothing contracted.
#pragma once
#include <metal_stdlib>

#ifdef __clang__
#pragma clang fp contract(off)
#endif

using namespace metal;

#define EXPERTILE_HALF_LARGEST 65504.0f

METAL_FUNC float sigmoid(float v) { return 1.0f / (1.0f + exp(-v)); }
METAL_FUNC float silu(float v) { return v / (1.0f + exp(-v)); }

// To half; beyond the largest half, to that one, and counted. NaN passes.
METAL_FUNC half saturate_to_half(float v, thread uint& count) {
  if (fabs(v) > EXPERTILE_HALF_LARGEST) {
    count += 1;
    return half(v > 0.0f ? EXPERTILE_HALF_LARGEST : -EXPERTILE_HALF_LARGEST);
  }
  return half(v);
}

// Adds to a count of 64 bits, low word first: Metal adds atomically to 32. At most two atomics a thread, and none where
// nothing saturated. The thread whose add wraps the low word carries.
METAL_FUNC void report_saturated(device atomic_uint* saturated, uint count) {
  if (count != 0) {
    const uint before = atomic_fetch_add_explicit(saturated, count, memory_order_relaxed);
    if (before + count < before) {
      atomic_fetch_add_explicit(saturated + 1, 1u, memory_order_relaxed);
    }
  }
}

// A thread of a kernel over one long array has FLAT_VECTORS vectors of four, FLAT_THREADS apart.
#define FLAT_THREADS 256
#define FLAT_VECTORS 2

METAL_FUNC ulong flat_first(uint group, uint thread_index) {
  return (ulong(group) * FLAT_VECTORS * FLAT_THREADS + thread_index) * 4;
}

METAL_FUNC ulong flat_at(ulong first, uint vector) { return first + ulong(vector) * FLAT_THREADS * 4; }

// Zero past the end.
METAL_FUNC float4 flat_read(const device float* from, ulong at, ulong n_values) {
  if (at + 4 <= n_values) {
    return *reinterpret_cast<const device float4*>(from + at);
  }
  float4 value = float4(0.0f);
  for (uint j = 0; j < 3; ++j) {
    if (at + j < n_values) {
      value[j] = from[at + j];
    }
  }
  return value;
}

METAL_FUNC void flat_write(device half* to, ulong at, ulong n_values, half4 value) {
  if (at + 4 <= n_values) {
    *reinterpret_cast<device half4*>(to + at) = value;
  } else {
    for (uint j = 0; j < 3; ++j) {
      if (at + j < n_values) {
        to[at + j] = value[j];
      }
    }
  }
}

// Sum over a simdgroup, the same bits in every lane and on every device: a butterfly adds the same pairs on both sides.
METAL_FUNC float simd_tree_sum(float v) {
  for (ushort step = 16; step > 0; step /= 2) {
    v = v + simd_shuffle_xor(v, step);
  }
  return v;
}

// Sum over a threadgroup of 256; `partial` holds 8 words. Every thread must call, and may call again.
METAL_FUNC float threadgroup_sum(float v, uint lane, uint simdgroup, threadgroup float* partial) {
  const float of_simdgroup = simd_tree_sum(v);
  threadgroup_barrier(mem_flags::mem_threadgroup);  // an earlier sum has been read
  if (lane == 0) {
    partial[simdgroup] = of_simdgroup;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float sum = 0.0f;
  for (uint i = 0; i < 8; ++i) {
    sum = sum + partial[i];
  }
  return sum;
}
