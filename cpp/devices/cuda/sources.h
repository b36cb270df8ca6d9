// sources.h: what metal/lower_cuda.py generates at build time: the kernels as CUDA text, embedded.
#pragma once

#include <vector>

#include "devices/cuda/compiler.h"

namespace expertile::cuda {

// A kernel's entry point: C++ text that, behind its file's text, defines `extern "C" __global__ void <name>(...)`.
struct Entry {
  const char* name;
  const char* file;  // name of the header that holds the lowered .metal file
  unsigned threads;  // of a threadgroup
  unsigned early;    // bit i: reads buffer i ahead of its wait for the launch before
  const char* text;
};

// The headers that stand in for metal_stdlib, and the lowered .metal files, by the names that #include uses.
const std::vector<Header>& cuda_shim();
const std::vector<Header>& cuda_files();
const std::vector<Entry>& cuda_entries();

}  // namespace expertile::cuda
