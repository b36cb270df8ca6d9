// gather.metal: tokens' rows, copied to where the plan sorted their entries.
//
//   rows[r, :] = x[stok[r], :];  zero where stok[r] is -1 (padding)
//
// x [T, D] fp32 (mm_gather) or half (mm_gather_h), stok [n_rows] and meta from the plan -> rows [n_rows, D] for the
// grouped gate and up GEMMs. One threadgroup a row. 16 bytes at a time where D allows, else one value.
#include <metal_stdlib>

#include "args.h"

using namespace metal;

// The model's 2,560 halves are 320 times 16 bytes: two a thread, and all threads at work.
#define GATHER_THREADS 160

// T must not be a number type whose copy could change its bits: NaN too comes through as it is. Four loads go ahead of
// their stores.
template <typename T>
METAL_FUNC void gather_row(const device T* x, int token, uint length, uint thread_index, device T* row) {
  if (token < 0) {
    for (uint i = thread_index; i < length; i += GATHER_THREADS) {
      row[i] = T(0);
    }
    return;
  }
  const device T* from = x + ulong(token) * length;
  for (uint first = thread_index; first < length; first += 4 * GATHER_THREADS) {
    T values[4];
    for (uint j = 0; j < 4; ++j) {
      if (first + j * GATHER_THREADS < length) {
        values[j] = from[first + j * GATHER_THREADS];
      }
    }
    for (uint j = 0; j < 4; ++j) {
      if (first + j * GATHER_THREADS < length) {
        row[first + j * GATHER_THREADS] = values[j];
      }
    }
  }
}

[[kernel, max_total_threads_per_threadgroup(GATHER_THREADS)]] void mm_gather(
    constant GatherArgs& args [[buffer(0)]], const device uint* meta [[buffer(1)]],
    const device int* stok [[buffer(2)]], const device float* x [[buffer(3)]], device float* rows [[buffer(4)]],
    uint row [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  if (row >= meta[EXPERTILE_META_ROWS]) {
    return;
  }
  const ulong first = ulong(row) * args.dim;
  if (args.dim % 4 == 0) {
    gather_row(reinterpret_cast<const device uint4*>(x), stok[row], args.dim / 4, thread_index,
               reinterpret_cast<device uint4*>(rows + first));
  } else {
    gather_row(reinterpret_cast<const device uint*>(x), stok[row], args.dim, thread_index,
               reinterpret_cast<device uint*>(rows + first));
  }
}

[[kernel, max_total_threads_per_threadgroup(GATHER_THREADS)]] void mm_gather_h(
    constant GatherArgs& args [[buffer(0)]], const device uint* meta [[buffer(1)]],
    const device int* stok [[buffer(2)]], const device half* xh [[buffer(3)]], device half* rows [[buffer(4)]],
    uint row [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  if (row >= meta[EXPERTILE_META_ROWS]) {
    return;
  }
  const ulong first = ulong(row) * args.dim;
  if (args.dim % 8 == 0) {
    gather_row(reinterpret_cast<const device uint4*>(xh), stok[row], args.dim / 8, thread_index,
               reinterpret_cast<device uint4*>(rows + first));
  } else {
    gather_row(reinterpret_cast<const device ushort*>(xh), stok[row], args.dim, thread_index,
               reinterpret_cast<device ushort*>(rows + first));
  }
}
