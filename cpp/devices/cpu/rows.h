// rows.h: what the row-wise native kernels share.
#pragma once

#include <cstddef>
#include <cstdint>

namespace expertile::cpu {

// Adds one task's saturated activations to the layer's count. A builtin: libc++ has std::atomic_ref from 19 on only,
// which the Xcode of macOS 14 is older than.
inline void count_saturated(std::uint64_t* total, std::uint64_t count) {
  if (count != 0) __atomic_fetch_add(total, count, __ATOMIC_RELAXED);
}

// Rows of n values that are worth a task of their own.
inline std::size_t row_grain(std::size_t n) { return n >= 8192 ? 1 : 8192 / (n + 1) + 1; }

}  // namespace expertile::cpu
