// sync.h: the types of Metal's barriers, votes and atomics, for the host and CUDA. What is done with them is in simd.h
// and atomic.h, for CUDA in ../cuda/threads.h.
#pragma once

#include "types.h"

namespace expertile::msl {
inline namespace EXPERTILE_ISA {
namespace metal {

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return static_cast<mem_flags>(static_cast<int>(a) | static_cast<int>(b));
}

class simd_vote {
 public:
  using vote_t = ulong;
  explicit constexpr simd_vote(vote_t bits = 0) : bits_(bits) {}
  explicit constexpr operator vote_t() const { return bits_; }
  constexpr bool all() const { return bits_ == 0xffffffffu; }
  constexpr bool any() const { return bits_ != 0; }

 private:
  vote_t bits_;
};

enum memory_order { memory_order_relaxed };

template <class T>
struct atomic {
  T value;
};

}  // namespace metal

using atomic_uint = metal::atomic<uint>;
using atomic_int = metal::atomic<int>;
using atomic_ulong = metal::atomic<ulong>;
using atomic_float = metal::atomic<float>;

}  // namespace EXPERTILE_ISA
}  // namespace expertile::msl
