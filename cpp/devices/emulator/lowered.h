// lowered.h: how the generated units hand over their kernels.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "devices/emulator/lane.h"
#include "expertile/program.h"

namespace expertile::emulator {

using EntryFunction = void (*)(const void* args, void* const* buffers, const Position& position);

struct LoweredKernel {
  KernelInfo info;
  EntryFunction entry;
};

// Generated: every kernel of metal/kernels, and the one of a name (nullptr = none).
const std::vector<LoweredKernel>& lowered_kernels();
const LoweredKernel* find_lowered(const std::string& name);

// Arguments of an entry's call: whatever pointer or args struct the kernel declares.
struct AnyPointer {
  void* address;
  template <class T>
  operator T*() const {  // NOLINT: implicit on purpose
    return static_cast<T*>(address);
  }
};
struct AnyArgs {
  const void* address;
  template <class T>
  operator const T&() const {  // NOLINT
    return *static_cast<const T*>(address);
  }
};
template <class Args, class... Rest>
constexpr std::uint32_t args_bytes(void (*)(const Args&, Rest...)) {
  return sizeof(Args);
}

// An attribute's value as the type that the kernel declares it with: a scalar takes x.
template <class T>
T as_position(std::uint32_t x, std::uint32_t y, std::uint32_t z) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(x);
  } else if constexpr (std::is_constructible_v<T, std::uint32_t, std::uint32_t, std::uint32_t>) {
    return T(x, y, z);
  } else {
    return T(x, y);
  }
}

}  // namespace expertile::emulator
