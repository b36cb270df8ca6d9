// garbage.h: what fresh memory holds where mistakes are to be seen.
#pragma once

#include <cstddef>

namespace expertile {

// 0xffa5 over and over: a NaN as half and as float, and as an integer neither 0 nor -1.
inline void fill_garbage(void* memory, std::size_t bytes) {
  unsigned char* byte = static_cast<unsigned char*>(memory);
  for (std::size_t i = 0; i < bytes; ++i) byte[i] = (i & 1) == 0 ? 0xa5 : 0xff;
}

constexpr unsigned char kGuardByte = 0x5c;
constexpr std::size_t kGuardBytes = 64;

// Index of the first byte that is no longer a guard's, or `bytes`.
inline std::size_t first_damaged(const void* memory, std::size_t bytes) {
  const unsigned char* byte = static_cast<const unsigned char*>(memory);
  std::size_t i = 0;
  while (i < bytes && byte[i] == kGuardByte) ++i;
  return i;
}

}  // namespace expertile
