// host_buffer.h: buffers of the devices whose kernels run on the host's cores (cpu, emulator).
#pragma once

#include "expertile/device.h"

namespace expertile {

class HostBuffer : public Buffer {
 public:
  // Throws DeviceError where `bytes` is 0 or there is no such memory. `guard`: words of kGuardBytes around the buffer,
  // and garbage inside. A `source` is used as it lies, without guards.
  HostBuffer(const std::string& device, std::uint64_t bytes, const std::byte* source, bool guard);
  ~HostBuffer() override;
  HostBuffer(const HostBuffer&) = delete;
  HostBuffer& operator=(const HostBuffer&) = delete;

  // Throws DeviceError naming `buffer` and `kernel` where a guard word was written.
  void check_guards(const std::string& buffer, const std::string& kernel) const;

 private:
  std::byte* memory_ = nullptr;  // nullptr = adopted
  bool guard_ = false;
};

// The five methods' common checks; `where` is the device's kind.
void host_write(const char* where, const BufferRef& to, std::uint64_t offset, const void* from, std::uint64_t bytes);
void host_copy(const char* where, const BufferRef& to, std::uint64_t to_offset, const BufferRef& from,
               std::uint64_t from_offset, std::uint64_t bytes);
// A caller's host memory as a buffer.
BufferRef host_adopt(const char* where, std::uint64_t address, std::uint64_t bytes);
void host_read(const char* where, const BufferRef& from, std::uint64_t offset, void* to, std::uint64_t bytes);

}  // namespace expertile
