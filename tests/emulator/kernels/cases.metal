// cases.metal: small kernels, right ones and wrong ones, to see what the emulator makes of them.
#include <metal_simdgroup_matrix>
#include <metal_stdlib>

using namespace metal;

struct CaseArgs {
  uint n;
  uint choice;
};

// y[t] = x[63 - t] through threadgroup memory, with its barrier or without.
template <bool BARRIER>
[[kernel, max_total_threads_per_threadgroup(64)]] void reverse(constant CaseArgs& args [[buffer(0)]],
                                                               const device uint* x [[buffer(1)]],
                                                               device uint* y [[buffer(2)]],
                                                               uint t [[thread_position_in_threadgroup]],
                                                               uint2 group [[threadgroup_position_in_grid]]) {
  threadgroup uint staged[64];
  x += group.x * 64;
  y += group.x * 64;
  staged[t] = x[t];
  if (BARRIER) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  y[t] = staged[63 - t] + args.n;
}
template [[host_name("reverse")]] [[kernel]] decltype(reverse<true>) reverse<true>;
template
    [[host_name("reverse_without_"
                "barrier")]] kernel void
    reverse<false>(constant CaseArgs&, const device uint*, device uint*, uint, uint2);

// The faults of control flow, by args.choice.
[[kernel, max_total_threads_per_threadgroup(64)]] void faults(constant CaseArgs& args [[buffer(0)]],
                                                              device uint* y [[buffer(1)]],
                                                              uint t [[thread_position_in_threadgroup]]) {
  y[t] = t;
  if (args.choice == 0 && t == 5) {
    return;  // before a barrier
  }
  if (args.choice == 1 && t >= 32) {
    threadgroup_barrier(mem_flags::mem_none);  // another one than the others'
  }
  if (args.choice == 2 && t % 2 == 0) {
    y[t] = simd_sum(t);  // half of the lanes
  }
  if (args.choice == 3) {
    if (t % 2 == 0) {
      return;
    }
    y[t] = simd_shuffle_xor(t, 1);  // from a lane that returned
    return;
  }
  if (args.choice == 4) {
    y[args.n] = 1;  // beyond the buffer
  }
  if (args.choice == 5 && t == 7) {
    simdgroup_float8x8 one;
    simdgroup_load(one, reinterpret_cast<device float*>(y));  // one lane only
    y[t] = uint(one.thread_elements()[0]);
  }
  if (args.choice == 6) {
    simdgroup_barrier(mem_flags::mem_none);
    y[t] = t < 32 ? simd_sum(t) : simd_max(t);  // different operations, but whole simdgroups: right
  }
  if (args.choice == 7) {
    y[t] = t % 2 == 0 ? simd_sum(t) : simd_max(t);  // lanes of one simdgroup at different operations
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Bytes of threadgroup memory, and a write behind it.
template <uint BYTES, uint WRITTEN>
[[kernel, max_total_threads_per_threadgroup(32)]] void memory(constant CaseArgs& args [[buffer(0)]],
                                                              device uint* y [[buffer(1)]],
                                                              uint t [[thread_position_in_threadgroup]]) {
  threadgroup uchar bytes[BYTES];
  threadgroup uint counter, unset[2];
  threadgroup uchar* cursor = bytes;
  if (t == 0) {
    counter = args.n;
    cursor[WRITTEN] = 1;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[t] = t == 0 ? counter : unset[t & 1];
}
template [[host_name("memory_fits")]] [[kernel]] decltype(memory<1024, 1023>) memory<1024, 1023>;
template [[host_name("memory_overrun")]] [[kernel]] decltype(memory<1000, 1000>) memory<1000, 1000>;
template [[host_name("memory_too_large")]] [[kernel]] decltype(memory<32768, 0>) memory<32768, 0>;

// y[op, t] for each simd operation of x[t].
[[kernel, max_total_threads_per_threadgroup(64)]] void simd_operations(constant CaseArgs& args [[buffer(0)]],
                                                                       const device uint* x [[buffer(1)]],
                                                                       device uint* y [[buffer(2)]],
                                                                       uint t [[thread_position_in_threadgroup]],
                                                                       uint lane [[thread_index_in_simdgroup]]) {
  const uint v = x[t];
  y[t] = simd_sum(v);
  y[64 + t] = simd_max(v);
  y[128 + t] = simd_min(v);
  y[192 + t] = simd_prefix_exclusive_sum(v);
  y[256 + t] = simd_prefix_inclusive_sum(v);
  y[320 + t] = simd_shuffle(v, ushort((lane * 7) % 32));
  y[384 + t] = simd_shuffle_xor(v, ushort(5));
  y[448 + t] = simd_shuffle_up(v, ushort(3));
  y[512 + t] = simd_shuffle_down(v, ushort(3));
  y[576 + t] = simd_broadcast(v, ushort(args.n));
  y[640 + t] = simd_broadcast_first(v);
  y[704 + t] = uint(ulong(simd_ballot((v & 1) != 0)));
  y[768 + t] = (simd_all(v != 0) ? 2 : 0) + (simd_any(v == x[0]) ? 1 : 0);
}

// c = a b + c of 8x8 matrices, and d = (a b)^T through a product whose left operand is a result.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(32)]] void matrices(constant CaseArgs& args [[buffer(0)]],
                                                                const device T* a [[buffer(1)]],
                                                                const device T* b [[buffer(2)]],
                                                                device float* c [[buffer(3)]],
                                                                device T* d [[buffer(4)]]) {
  threadgroup T staged[8 * 8];
  simdgroup_matrix<T, 8, 8> left, right, result;
  simdgroup_float8x8 sum;
  simdgroup_load(left, a, args.n);
  simdgroup_load(right, b, 8, ulong2(0, 0), args.choice != 0);
  simdgroup_load(sum, c, 8);
  simdgroup_multiply_accumulate(sum, left, right, sum);
  simdgroup_store(sum, c, 8);
  simdgroup_multiply(result, left, right);
  result.thread_elements()[0] += T(1);
  simdgroup_multiply(result, result, right);
  simdgroup_store(result, staged, 8, ulong2(0, 0), true);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_load(result, staged, 8);
  simdgroup_store(result, d, 8);
}
template [[host_name("matrices_half")]] [[kernel]] decltype(matrices<half>) matrices<half>;
template [[host_name("matrices_float")]] [[kernel]] decltype(matrices<float>) matrices<float>;

// Bins of x over many threadgroups: counts, smallest, largest.
[[kernel, max_total_threads_per_threadgroup(96)]] void bins(constant CaseArgs& args [[buffer(0)]],
                                                            const device uint* x [[buffer(1)]],
                                                            device atomic_uint* counts [[buffer(2)]],
                                                            device atomic_int* range [[buffer(3)]],
                                                            uint i [[thread_position_in_grid]]) {
  if (i >= args.n) {
    return;
  }
  atomic_fetch_add_explicit(&counts[x[i] % 8], 1u, memory_order_relaxed);
  atomic_fetch_min_explicit(&range[0], int(x[i]), memory_order_relaxed);
  atomic_fetch_max_explicit(&range[1], int(x[i]), memory_order_relaxed);
}

// Conversions and arithmetic of half: y = float(h), z = half(x), s = h[i] op h[n - 1 - i].
[[kernel, max_total_threads_per_threadgroup(128)]] void halves(
    constant CaseArgs& args [[buffer(0)]], const device half* h [[buffer(1)]], const device float* x [[buffer(2)]],
    device float* y [[buffer(3)]], device half* z [[buffer(4)]], device half* s [[buffer(5)]],
    uint i [[thread_position_in_grid]]) {
  if (i >= args.n) {
    return;
  }
  y[i] = h[i];
  z[i] = half(x[i]);
  const half a = h[i];
  const half b = h[args.n - 1 - i];
  s[4 * i] = a + b;
  s[4 * i + 1] = a * b;
  s[4 * i + 2] = a / b;
  s[4 * i + 3] = fma(a, b, 1.5h);
}
