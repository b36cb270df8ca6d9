// prefetch.h: asking early for what comes next: a panel walks its compressed rows side by side, a few lines of each at
// a time, and the processor's own prefetching does not follow.
#pragma once

#include <cstddef>
#include <cstdint>

namespace {

constexpr int kToL1 = 3, kToL2 = 2;

// The n bytes that lie `distance` behind p. There need not be any memory.
template <int Cache>
inline void prefetch_behind(const std::uint8_t* p, std::size_t distance, std::size_t n) {
  const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(p) + distance;
  for (std::size_t at = 0; at < n; at += 64) __builtin_prefetch(reinterpret_cast<const void*>(address + at), 0, Cache);
}

}  // namespace
