// program.h: launches as data, and the check of their barriers.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "expertile/device.h"

namespace expertile {

enum class Access : std::uint8_t { Read, Write, ReadWrite };

// A byte range of a buffer as one launch uses it.
struct Binding {
  BufferRef buffer;
  Access access = Access::Read;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  std::string name;  // for people: "ids", "blk.0.ffn_gate_exps"
};

// How a GEMM takes its weights: as halves, exactly, or rounded once more, to bf16 (cpu alone).
enum class Precision : std::uint8_t { Exact, Bf16 };
const char* precision_name(Precision precision);         // "exact", "bf16"
Precision precision_from_name(const std::string& name);  // std::invalid_argument for another name

// Threadgroups to launch: given, or read by the device from three words of `indirect` at `indirect_offset` bytes.
struct Grid {
  std::array<std::uint32_t, 3> size{1, 1, 1};
  BufferRef indirect;  // nullptr = direct
  std::uint64_t indirect_offset = 0;
  std::array<std::uint32_t, 3> max_grid{1, 1, 1};  // bound on an indirect grid
};

struct Launch {
  std::string kernel;
  std::vector<std::byte> args;   // buffer(0), the kernel's args struct
  std::vector<Binding> buffers;  // buffer(1), buffer(2), ... in kernel order
  Grid grid;
  Precision precision = Precision::Exact;
  std::string step;                // where its time is counted: "plan", "experts"
  const void* pipeline = nullptr;  // set by Device::prepare
};

// Launches that may run at the same time; one barrier behind them.
struct Group {
  std::string name;
  std::vector<Launch> launches;
};

struct Program {
  std::string name;
  std::vector<Group> groups;
  std::vector<Binding> inputs;     // what is written before the program starts: weights, the host's arrays
  std::shared_ptr<void> prepared;  // the device's own state, set by Device::prepare
};

template <class Args>
std::vector<std::byte> pack_args(const Args& args) {
  std::vector<std::byte> bytes(sizeof(Args));
  std::memcpy(bytes.data(), &args, sizeof(Args));
  return bytes;
}

// One fault of a program: kind is "hazard", "unwritten", "barrier" or "contract".
struct Fault {
  std::string kind;
  std::string where;  // group, launch
  std::string detail;
};

// Pure: reads nothing but `program` and the kernels' reflection. Empty = no hazard inside a group, nothing read before
// it was written, no barrier that no hazard needs, every launch as its kernel declares.
std::vector<Fault> check_program(const Program& program);

// What reflect.py read off a kernel's signature.
struct KernelBuffer {
  const char* name;
  std::uint32_t index;
  bool is_const;
  bool pointers = false;  // it holds 64-bit addresses of other buffers (a table of experts)
};
struct KernelInfo {
  const char* name;
  const char* file;
  std::uint32_t args_bytes;
  std::uint32_t threads;              // max_total_threads_per_threadgroup: exactly so many are launched
  std::vector<KernelBuffer> buffers;  // without buffer(0)
};
const std::vector<KernelInfo>& kernel_table();
const KernelInfo* find_kernel(const std::string& name);

}  // namespace expertile
