// host_buffer.cpp: memory with its guards, and the copies in and out.
#include "devices/host_buffer.h"

#include <cstdlib>
#include <cstring>
#include <new>

#include "devices/garbage.h"
#include "expertile/error.h"

namespace expertile {
namespace {

constexpr std::size_t kAlignment = 4096;  // a page: also what unbuffered file reads ask for

void check_range(const char* where, const BufferRef& buffer, std::uint64_t offset, std::uint64_t bytes) {
  if (buffer == nullptr || buffer->host() == nullptr) {
    throw std::invalid_argument(expected_got(where, "a buffer of this device", "none"));
  }
  if (offset > buffer->bytes() || bytes > buffer->bytes() - offset) {
    const std::string expected = "a range within " + std::to_string(buffer->bytes()) + " bytes";
    const std::string got = std::to_string(bytes) + " bytes at " + std::to_string(offset);
    throw std::invalid_argument(expected_got(where, expected, got));
  }
}

}  // namespace

HostBuffer::HostBuffer(const std::string& device, std::uint64_t bytes, const std::byte* source, bool guard) {
  if (bytes == 0) throw std::invalid_argument(expected_got(device + " alloc", "at least 1 byte", 0));
  bytes_ = bytes;
  if (source != nullptr) {
    host_ = const_cast<std::byte*>(source);
  } else {
    const std::uint64_t around = guard ? 2 * kAlignment : kAlignment;  // the front guard keeps the alignment
    const bool fits = bytes < (std::uint64_t{1} << 62);
    const std::uint64_t total = (bytes + around + kAlignment - 1) / kAlignment * kAlignment;
    memory_ = fits ? static_cast<std::byte*>(std::aligned_alloc(kAlignment, total)) : nullptr;
    if (memory_ == nullptr) {
      throw DeviceError(expected_got(device + " alloc", std::to_string(bytes) + " bytes of memory", "less"));
    }
    guard_ = guard;
    host_ = guard ? memory_ + kAlignment : memory_;
    if (guard) {
      fill_garbage(host_, bytes);
      std::memset(host_ - kGuardBytes, kGuardByte, kGuardBytes);
      std::memset(host_ + bytes, kGuardByte, kGuardBytes);
    }
  }
  address_ = reinterpret_cast<std::uintptr_t>(host_);
}

HostBuffer::~HostBuffer() { std::free(memory_); }

void HostBuffer::check_guards(const std::string& buffer, const std::string& kernel) const {
  if (!guard_) return;
  const std::string where = "kernel " + kernel + ", buffer " + buffer;
  const std::string expected = "writes within its " + std::to_string(bytes_) + " bytes";
  const std::size_t behind = first_damaged(host_ + bytes_, kGuardBytes);
  if (behind != kGuardBytes) {
    throw DeviceError(expected_got(where, expected, "one at byte " + std::to_string(bytes_ + behind)));
  }
  const std::size_t before = first_damaged(host_ - kGuardBytes, kGuardBytes);
  if (before != kGuardBytes) {
    const std::string got = "one " + std::to_string(kGuardBytes - before) + " bytes before it";
    throw DeviceError(expected_got(where, expected, got));
  }
}

void host_write(const char* where, const BufferRef& to, std::uint64_t offset, const void* from, std::uint64_t bytes) {
  check_range(where, to, offset, bytes);
  if (bytes != 0) std::memcpy(to->host() + offset, from, bytes);
}

void host_read(const char* where, const BufferRef& from, std::uint64_t offset, void* to, std::uint64_t bytes) {
  check_range(where, from, offset, bytes);
  if (bytes != 0) std::memcpy(to, from->host() + offset, bytes);
}

void host_copy(const char* where, const BufferRef& to, std::uint64_t to_offset, const BufferRef& from,
               std::uint64_t from_offset, std::uint64_t bytes) {
  check_range(where, to, to_offset, bytes);
  check_range(where, from, from_offset, bytes);
  if (bytes != 0) std::memcpy(to->host() + to_offset, from->host() + from_offset, bytes);
}

BufferRef host_adopt(const char* where, std::uint64_t address, std::uint64_t bytes) {
  if (address == 0 || bytes == 0 || bytes - 1 > ~address) {
    throw std::invalid_argument(expected_got(where, "an address and at least 1 byte",
                                             std::to_string(bytes) + " bytes at " + std::to_string(address)));
  }
  return std::make_shared<HostBuffer>(where, bytes, reinterpret_cast<const std::byte*>(address), false);
}

BufferRef Device::adopt(std::uint64_t, std::uint64_t) {
  throw std::invalid_argument(expected_got("adopt", "a device that takes a caller's memory", kind()));
}

void Device::copy(const BufferRef& to, std::uint64_t to_offset, const BufferRef& from, std::uint64_t from_offset,
                  std::uint64_t bytes) {
  host_copy((std::string(kind()) + " copy").c_str(), to, to_offset, from, from_offset, bytes);
}

}  // namespace expertile
