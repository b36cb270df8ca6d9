// native.h: how a native kernel of the cpu device is called, and how it is found by its name.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "devices/cpu/kernels.h"
#include "expertile/program.h"

namespace expertile {

class ThreadPool;

// One launch. `buffers[0]` is kernel buffer 1, every pointer already moved to the bound range's first byte.
struct NativeCall {
  const std::byte* args;
  std::vector<std::byte*> buffers;
  std::array<std::uint32_t, 3> grid;  // in threadgroups, read from meta already where the launch is indirect
  ThreadPool& pool;
  const cpu::Kernels& kernels;
  Precision precision;

  template <typename Args>
  const Args& arguments() const {
    return *reinterpret_cast<const Args*>(args);
  }
  template <typename Value>
  Value* buffer(std::size_t number) const {  // by kernel buffer number, from 1
    return reinterpret_cast<Value*>(buffers[number - 1]);
  }
};

using NativeKernel = void (*)(const NativeCall&);

// The native form of the kernel `name` ("mm_hist", "gemm_dense_q8_0_16_64_32_2"), or nullptr: it runs emulated then.
NativeKernel find_native(const std::string& name);

// The parts of the search, one a source file; each returns nullptr for a name that is not its own.
NativeKernel find_native_plan(const std::string& name);         // plan.cpp: mm_*
NativeKernel find_native_gemm(const std::string& name);         // gemm.cpp: gemm_*
NativeKernel find_native_elementwise(const std::string& name);  // elementwise.cpp: the rest

}  // namespace expertile
