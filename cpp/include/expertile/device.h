// device.h: a device is five methods; three more are for a caller with memory and a queue of his own on it.
//
// A server's own stream and memory on CUDA (metal.h has Metal's):
//
//   DeviceOptions options;
//   options.stream = reinterpret_cast<std::uint64_t>(stream);            // a CUstream or cudaStream_t
//   auto device = open_device("cuda", options);
//   Window window(model, device, {.max_tokens = 2048});
//   BufferRef mine = device->adopt(pointer, bytes);                        // a CUdeviceptr; stays the caller's
//   device->copy(window.buffer("streams"), 0, mine, 0, bytes);             // behind what the stream holds already
//   window.clear_faults(n_tokens);                                         // before a chunk's first layer
//   window.moe_layer(layer, n_tokens);
//   device->copy(mine, 0, window.buffer("streams"), 0, bytes);
//
// Every call puts its work on that stream, behind what is on it, and returns when that work is done. Without a stream
// of the caller's the device has one of its own, ordered with no other: wait_for_caller() then comes before the first
// call that reads what the caller's work wrote.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace expertile {

struct Program;

// Memory of one device. Freed with the last reference.
class Buffer {
 public:
  virtual ~Buffer() = default;
  std::uint64_t bytes() const { return bytes_; }
  // The address that kernels of the device see (what a table of expert pointers holds).
  std::uint64_t address() const { return address_; }
  // The same memory as the host sees it, or nullptr where the host cannot.
  std::byte* host() const { return host_; }

 protected:
  std::uint64_t bytes_ = 0;
  std::uint64_t address_ = 0;
  std::byte* host_ = nullptr;
};

using BufferRef = std::shared_ptr<Buffer>;

class Device {
 public:
  virtual ~Device() = default;
  virtual const char* kind() const = 0;  // "cpu", "emulator", "metal", "cuda"
  virtual std::string name() const = 0;  // what the machine calls it

  // `bytes` > 0 of garbage; or, with `source`, that host memory: adopted without a copy where the device can, copied
  // where it cannot. The caller keeps `source` alive as long as the buffer. Throws DeviceError with the size.
  virtual BufferRef alloc(std::uint64_t bytes, const std::byte* source = nullptr) = 0;
  virtual void write(const BufferRef& to, std::uint64_t offset, const void* from, std::uint64_t bytes) = 0;
  virtual void read(const BufferRef& from, std::uint64_t offset, void* to, std::uint64_t bytes) = 0;
  // Resolves kernel names once; throws DeviceError naming a kernel that is missing or does not compile.
  virtual void prepare(Program& program) = 0;
  // Runs the groups in order; returns the seconds that the device worked.
  virtual double run(const Program& program) = 0;
  // What went less well than it could, said once, for the caller to show; "" = nothing. The engine never prints.
  virtual std::string take_warning() { return {}; }

  // `bytes` of the caller's memory at `address` as a buffer: a pointer of this GPU (cuda), an address inside a buffer
  // that this device knows (metal; see metal_buffer), a host pointer (cpu, emulator). Nothing is copied; the memory
  // stays the caller's, who keeps it as long as the buffer. Throws std::invalid_argument for memory that is not this
  // device's or is shorter.
  virtual BufferRef adopt(std::uint64_t address, std::uint64_t bytes);
  // Between two buffers of this device, which may not overlap, without a third. As given here it is for devices whose
  // buffers the host sees.
  virtual void copy(const BufferRef& to, std::uint64_t to_offset, const BufferRef& from, std::uint64_t from_offset,
                    std::uint64_t bytes);
  // Waits for all work that others have put on the device; on the caller's own stream there is nothing to wait for.
  virtual void wait_for_caller() {}
};

struct DeviceStatus {
  std::string kind;
  bool present = false;
  std::string detail;  // the device's name, or why it is absent
};

// Every kind of device this engine knows, present or not, best first.
std::vector<DeviceStatus> list_devices();

struct DeviceOptions {
  int threads = 0;         // cpu, emulator: worker threads; 0 = as many as this process may use
  std::string order;       // emulator: "ascending", "reversed" or "shuffled"; "" = ascending
  std::uint64_t seed = 0;  // emulator: of the shuffled order
  bool guard = false;      // cpu, emulator: poison new buffers, guard words around them, checked after each run
  // cuda: the caller's CUstream to put all work on, kept by him as long as the device; 0 is the default stream. It
  // names the GPU, too. None = a stream of the device's own on the first GPU.
  std::optional<std::uint64_t> stream;
  std::string instructions;  // cpu: "avx512+amx", "amx", "avx512", "avx2", "neon", "portable"; "" = the best
};

// Throws std::invalid_argument for an unknown kind or instructions that this machine lacks, DeviceError where it is
// absent, saying why.
std::shared_ptr<Device> open_device(const std::string& kind, const DeviceOptions& options = {});

}  // namespace expertile
