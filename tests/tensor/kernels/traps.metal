// traps.metal: matmul2d used right and, by FAULT, wrong in one way each, to see what the emulator makes of it.
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
#include <metal_stdlib>
#include <metal_tensor>

using namespace metal;
using namespace mpp::tensor_ops;

struct TrapArgs {
  uint n_inner;
  uint choice;
};

typedef tensor<threadgroup half, dextents<int32_t, 2>, tensor_inline> Staged;
typedef tensor<device half, dextents<int32_t, 2>, tensor_inline> Stored;

#define RIGHT 0
#define OVERWRITES 1
#define UNSET 2
#define SWAPPED 3
#define RETURNS 4
#define LANES 5
#define NO_BARRIER 6
#define INVALID 7
#define CAPACITY 8

// y [16][32] = x [16][n_inner] times w [32][n_inner] transposed, staged by 32 of k.
template <uint FAULT, uint DISPATCHED, uint SIMDGROUPS>
[[kernel, max_total_threads_per_threadgroup(DISPATCHED * 32)]] void staged(constant TrapArgs& args [[buffer(0)]],
                                                                           const device half* x [[buffer(1)]],
                                                                           const device half* w [[buffer(2)]],
                                                                           device float* y [[buffer(3)]],
                                                                           uint t [[thread_position_in_threadgroup]]) {
  threadgroup half a[16 * 32], b[32 * 32];
  threadgroup float c[16 * 32];
  matmul2d<matmul2d_descriptor(16, 32, 32, false, true, false,
                               FAULT == OVERWRITES ? matmul2d_descriptor::mode::multiply
                                                   : matmul2d_descriptor::mode::multiply_accumulate),
           execution_simdgroups<SIMDGROUPS>>
      product;
  auto sums = product.template get_destination_cooperative_tensor<Staged, Staged, float>();
  if (FAULT != UNSET) {
    for (ushort i = 0; i < sums.get_capacity() + (FAULT == CAPACITY ? 1 : 0); ++i) {
      if (sums.is_valid_element(i)) {
        sums[i] = 0.0f;
      }
    }
  }
  if (FAULT == RETURNS && (args.choice == 0 ? t == 5 : t >= (DISPATCHED - 1) * 32)) {
    return;
  }
  for (uint k = 0; k < args.n_inner; k += 32) {
    if (FAULT != NO_BARRIER && FAULT != RETURNS) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    for (uint i = t; i < 16 * 32; i += DISPATCHED * 32) {
      a[i] = k + i % 32 < args.n_inner ? x[i / 32 * args.n_inner + k + i % 32] : half(0.0f);
    }
    for (uint i = t; i < 32 * 32; i += DISPATCHED * 32) {
      b[i] = k + i % 32 < args.n_inner ? w[i / 32 * args.n_inner + k + i % 32] : half(0.0f);
    }
    if (FAULT != NO_BARRIER && FAULT != RETURNS) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    Staged left(a, FAULT == SWAPPED ? dextents<int32_t, 2>(16, 32) : dextents<int32_t, 2>(32, 16));
    Staged right(b, dextents<int32_t, 2>(32, 32));
    product.run(left, right, sums);
  }
  if (FAULT == RETURNS) {
    return;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (ushort i = 0; i < sums.get_capacity(); ++i) {
    if (FAULT == LANES) {
      c[(t * 512 / (DISPATCHED * 32) + i) % 512] = sums[i];
    } else if (FAULT == INVALID || sums.is_valid_element(i)) {
      const auto at = sums.get_multidimensional_index(i);
      c[at[1] * 32 + at[0]] = sums[i];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = t; i < 16 * 32; i += DISPATCHED * 32) {
    y[i] = c[i];
  }
}

#define STAGED(name, FAULT, DISPATCHED, SIMDGROUPS) \
  template [[host_name(                             \
      name)]] [[kernel]] decltype(staged<FAULT, DISPATCHED, SIMDGROUPS>) staged<FAULT, DISPATCHED, SIMDGROUPS>;
STAGED("staged_right", RIGHT, 4, 4)
STAGED("staged_right_two", RIGHT, 2, 2)
STAGED("staged_overwrites", OVERWRITES, 4, 4)
STAGED("staged_unset", UNSET, 4, 4)
STAGED("staged_swapped", SWAPPED, 4, 4)
STAGED("staged_returns", RETURNS, 4, 4)
STAGED("staged_scope", RIGHT, 2, 4)
STAGED("staged_lanes", LANES, 4, 4)
STAGED("staged_no_barrier", NO_BARRIER, 4, 4)
STAGED("staged_invalid", INVALID, 4, 4)
STAGED("staged_capacity", CAPACITY, 4, 4)

// The same from memory by slices, with K of the descriptor static or dynamic. Rows lie `choice` halves further apart.
template <int K>
[[kernel, max_total_threads_per_threadgroup(32)]] void sliced(constant TrapArgs& args [[buffer(0)]],
                                                              device half* x [[buffer(1)]],
                                                              device half* w [[buffer(2)]],
                                                              device float* y [[buffer(3)]]) {
  matmul2d<matmul2d_descriptor(16, 32, K, false, true, false, matmul2d_descriptor::mode::multiply_accumulate),
           execution_simdgroup>
      product;
  auto sums = product.template get_destination_cooperative_tensor<Stored, Stored, float>();
  for (ushort i = 0; i < sums.get_capacity(); ++i) {
    if (sums.is_valid_element(i)) {
      sums[i] = 0.0f;
    }
  }
  const int inner = int(args.n_inner);
  const Stored rows(x, dextents<int32_t, 2>(inner, 16), array<int32_t, 2>{1, inner + int(args.choice)});
  const Stored weights(w, dextents<int32_t, 2>(inner, 32));
  for (int k = 0; k < inner; k += K < 0 ? inner : K) {
    Stored left = rows.slice(k, 0);
    Stored right = weights.slice(k, 0);
    product.run(left, right, sums);
  }
  for (ushort i = 0; i < sums.get_capacity(); ++i) {
    if (sums.is_valid_element(i)) {
      const auto at = sums.get_multidimensional_index(i);
      y[at[1] * 32 + at[0]] = sums[i];
    }
  }
}
template [[host_name("sliced_static")]] [[kernel]] decltype(sliced<32>) sliced<32>;
template [[host_name("sliced_dynamic")]] [[kernel]] decltype(sliced<static_cast<int>(dynamic_extent)>)
    sliced<static_cast<int>(dynamic_extent)>;

// n_inner = 32, the weights in registers: by index, by a guess at the lanes' layout, or not all of them.
template <uint FAULT>
[[kernel, max_total_threads_per_threadgroup(32)]] void registers(constant TrapArgs& args [[buffer(0)]],
                                                                 device half* x [[buffer(1)]],
                                                                 const device half* w [[buffer(2)]],
                                                                 device float* y [[buffer(3)]],
                                                                 uint t [[thread_position_in_threadgroup]]) {
  typedef matmul2d<matmul2d_descriptor(16, 32, 32, false, true, false, matmul2d_descriptor::mode::multiply_accumulate),
                   execution_simdgroup>
      Product;
  typedef typename Product::template cooperative_tensor_right_input_t<half, half, float, int> Right;
  Product product;
  Right right = product.template get_right_input_cooperative_tensor<half, half, float>();
  auto sums = product.template get_destination_cooperative_tensor<Stored, Right, float>();
  for (ushort i = 0; i < sums.get_capacity(); ++i) {
    if (sums.is_valid_element(i)) {
      sums[i] = 0.0f;
    }
  }
  for (ushort i = 0; i < right.get_capacity(); ++i) {
    if (FAULT == LANES) {
      right[i] = w[(t * 32 + i) % 1024];
    } else if (right.is_valid_element(i)) {
      const auto at = right.get_multidimensional_index(i);
      if (FAULT != UNSET || at[1] < 31) {
        right[i] = w[at[1] * 32 + at[0]];
      }
    }
  }
  Stored left(x, dextents<int32_t, 2>(int(args.n_inner), 16));
  product.run(left, right, sums);
  for (ushort i = 0; i < sums.get_capacity(); ++i) {
    if (sums.is_valid_element(i)) {
      const auto at = sums.get_multidimensional_index(i);
      y[at[1] * 32 + at[0]] = sums[i];
    }
  }
}
template [[host_name("registers_right")]] [[kernel]] decltype(registers<RIGHT>) registers<RIGHT>;
template [[host_name("registers_lanes")]] [[kernel]] decltype(registers<LANES>) registers<LANES>;
template [[host_name("registers_unset")]] [[kernel]] decltype(registers<UNSET>) registers<UNSET>;
