// device.h: a device is five methods.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
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
};

// Throws std::invalid_argument for an unknown kind, DeviceError where it is absent, saying why.
std::shared_ptr<Device> open_device(const std::string& kind, const DeviceOptions& options = {});

}  // namespace expertile
