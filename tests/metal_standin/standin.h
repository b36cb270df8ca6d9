// standin.h: what a test sets before it opens the device, and what it may ask afterwards.
#pragma once

#include <cstdint>
#include <string>

namespace standin {

struct Settings {
  bool present = true;  // is there a GPU at all?
  int os_major = 26, os_minor = 2;
  int family = 1009;  // the highest Apple family supported; 1010 has neural accelerators
  std::uint32_t max_threads = 1024;
  std::uint64_t max_buffer_bytes = std::uint64_t{1} << 36;
  std::uint32_t threadgroup_bytes = 32768;
  bool no_copy = true;            // newBufferWithBytesNoCopy gives a buffer where it may
  std::string fails_to_compile;   // "gemm.metal", "gemm.metal tensor", "gemm.metal k4"
  std::string fails_as_pipeline;  // a kernel's name, or "<name> tensor", "<name> k4"
  std::string fails_on_the_gpu;   // a kernel's name
};
Settings& settings();

struct Counts {
  std::uint64_t libraries = 0;          // compiled from source
  std::uint64_t pipelines = 0;          // compiled
  std::uint64_t from_archive = 0;       // pipelines found in a binary archive
  std::uint64_t tensor_dispatches = 0;  // of pipelines of a tensor library
  std::uint64_t dispatches = 0, barriers = 0, encoders = 0, command_buffers = 0;
  std::uint64_t copied_bytes = 0, adopted_bytes = 0;  // of buffers made with their own memory, and without a copy
};
Counts& counts();

}  // namespace standin
