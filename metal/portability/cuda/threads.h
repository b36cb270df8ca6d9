// threads.h: Metal's barriers, simdgroup functions and atomics on CUDA. A simdgroup is a warp.
//
// The masks name all 32 lanes: a lane that has returned no longer takes part, which is Metal's rule for active lanes as
// long as the rest reach the call together, and the emulator refuses kernels in which they do not.
#pragma once

#include "math.h"
#include "sync.h"

namespace expertile::msl {
inline namespace EXPERTILE_ISA {
namespace metal {

inline void threadgroup_barrier(mem_flags) { __syncthreads(); }
inline void simdgroup_barrier(mem_flags) { __syncwarp(); }

constexpr unsigned kAllLanes = 0xffffffffu;

// A value moved between lanes word by word.
template <class T, class Move>
inline T simd_moved(const T& value, const Move& move) {
  if constexpr (sizeof(T) < 4) {
    using Bits = std::conditional_t<sizeof(T) == 1, uchar, ushort>;
    return std::bit_cast<T>(static_cast<Bits>(move(std::bit_cast<Bits>(value))));
  } else {
    struct Words {
      uint word[sizeof(T) / 4];
    };
    Words words = std::bit_cast<Words>(value);
    for (uint& word : words.word) word = move(word);
    return std::bit_cast<T>(words);
  }
}

template <class T>
inline T simd_shuffle(T value, ushort lane) {
  return simd_moved(value, [&](uint word) { return __shfl_sync(kAllLanes, word, lane); });
}
template <class T>
inline T simd_shuffle_xor(T value, ushort mask) {
  return simd_moved(value, [&](uint word) { return __shfl_xor_sync(kAllLanes, word, mask); });
}
template <class T>
inline T simd_shuffle_down(T value, ushort delta) {
  return simd_moved(value, [&](uint word) { return __shfl_down_sync(kAllLanes, word, delta); });
}
template <class T>
inline T simd_shuffle_up(T value, ushort delta) {
  return simd_moved(value, [&](uint word) { return __shfl_up_sync(kAllLanes, word, delta); });
}
template <class T>
inline T simd_broadcast(T value, ushort lane) {
  return simd_shuffle(value, lane);
}
template <class T>
inline T simd_broadcast_first(T value) {
  return simd_shuffle(value, static_cast<ushort>(__ffs(static_cast<int>(__activemask())) - 1));
}

// Lanes 16, 8, 4, 2 and 1 apart: the emulator's tree, so that sums of floats have its bits.
template <class T, class Combine>
inline T simd_reduced(T value, const Combine& combine) {
  for (ushort mask = 16; mask > 0; mask >>= 1) value = combine(value, simd_shuffle_xor(value, mask));
  return value;
}
template <class T>
inline T simd_sum(T value) {
#if __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<T, uint> || std::is_same_v<T, int>) return __reduce_add_sync(kAllLanes, value);
#endif
  return simd_reduced(value, [](T a, T b) { return static_cast<T>(a + b); });
}
template <class T>
inline T simd_max(T value) {
#if __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<T, uint> || std::is_same_v<T, int>) return __reduce_max_sync(kAllLanes, value);
#endif
  return simd_reduced(value, [](T a, T b) { return max(a, b); });
}
template <class T>
inline T simd_min(T value) {
#if __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<T, uint> || std::is_same_v<T, int>) return __reduce_min_sync(kAllLanes, value);
#endif
  return simd_reduced(value, [](T a, T b) { return min(a, b); });
}
#define EXPERTILE_SIMD_REDUCTION(name, op)                                       \
  template <class T>                                                             \
  inline T name(T value) {                                                       \
    return simd_reduced(value, [](T a, T b) { return static_cast<T>(a op b); }); \
  }
EXPERTILE_SIMD_REDUCTION(simd_product, *)
EXPERTILE_SIMD_REDUCTION(simd_or, |)
EXPERTILE_SIMD_REDUCTION(simd_and, &)
EXPERTILE_SIMD_REDUCTION(simd_xor, ^)
#undef EXPERTILE_SIMD_REDUCTION

inline uint simd_lane() {
  uint lane;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}
template <class T>
inline T simd_prefix_inclusive_sum(T value) {
  const uint lane = simd_lane();
  for (ushort delta = 1; delta < 32; delta <<= 1) {
    const T below = simd_shuffle_up(value, delta);
    value = lane >= delta ? static_cast<T>(below + value) : value;
  }
  return value;
}
template <class T>
inline T simd_prefix_exclusive_sum(T value) {
  const T inclusive = simd_prefix_inclusive_sum(value);
  const T below = simd_shuffle_up(inclusive, 1);
  return simd_lane() == 0 ? T(0) : below;
}

inline simd_vote simd_ballot(bool value) { return simd_vote(__ballot_sync(kAllLanes, value)); }
inline bool simd_all(bool value) { return __all_sync(kAllLanes, value) != 0; }
inline bool simd_any(bool value) { return __any_sync(kAllLanes, value) != 0; }
inline bool simd_is_first() { return simd_lane() + 1 == static_cast<uint>(__ffs(static_cast<int>(__activemask()))); }

template <class T>
inline T atomic_load_explicit(const atomic<T>* at, memory_order) {
  return *const_cast<const volatile T*>(&at->value);
}
template <class T>
inline void atomic_store_explicit(atomic<T>* at, std::type_identity_t<T> value, memory_order) {
  *const_cast<volatile T*>(&at->value) = value;
}
#define EXPERTILE_ATOMIC(name, function)                                      \
  template <class T>                                                          \
  inline T name(atomic<T>* at, std::type_identity_t<T> value, memory_order) { \
    return function(&at->value, value);                                       \
  }
EXPERTILE_ATOMIC(atomic_fetch_add_explicit, ::atomicAdd)
EXPERTILE_ATOMIC(atomic_fetch_sub_explicit, ::atomicSub)
EXPERTILE_ATOMIC(atomic_fetch_min_explicit, ::atomicMin)
EXPERTILE_ATOMIC(atomic_fetch_max_explicit, ::atomicMax)
EXPERTILE_ATOMIC(atomic_fetch_and_explicit, ::atomicAnd)
EXPERTILE_ATOMIC(atomic_fetch_or_explicit, ::atomicOr)
EXPERTILE_ATOMIC(atomic_fetch_xor_explicit, ::atomicXor)
EXPERTILE_ATOMIC(atomic_exchange_explicit, ::atomicExch)
#undef EXPERTILE_ATOMIC
template <class T>
inline bool atomic_compare_exchange_weak_explicit(atomic<T>* at, T* expected, std::type_identity_t<T> desired,
                                                  memory_order, memory_order) {
  const T before = ::atomicCAS(&at->value, *expected, desired);
  const bool done = before == *expected;
  *expected = before;
  return done;
}

}  // namespace metal

// With programmatic launch the next kernel's threadgroups may come up as soon as all of this one's are past this; they
// then wait here for its end and for what it wrote. Every entry point calls it first, but for kernels that call it
// themselves, behind what needs nothing of the launch before: row 0 of every grid waits, so that the end of a grid
// implies the end of all before it.
inline void await_inputs() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace EXPERTILE_ISA
}  // namespace expertile::msl

// The head of every entry point. Rows of threadgroups lie on y and, past 65,535, on z.
#define EXPERTILE_ENTER(rows)                               \
  [[maybe_unused]] const uint group_x = blockIdx.x;         \
  const uint group_y = blockIdx.z * gridDim.y + blockIdx.y; \
  if (group_y >= rows) return;
