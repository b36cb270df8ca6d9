// worker_memory.cpp: a worker's threadgroup memory.
#include <cstring>

#include "devices/emulator/worker.h"
#include "devices/garbage.h"
#include "expertile/error.h"

namespace expertile::emulator {

void* Worker::threadgroup_memory(const void* key, std::size_t bytes, const char* name, Site site) {
  unsigned char* base = memory_.get() + (16 - reinterpret_cast<std::uintptr_t>(memory_.get()) % 16) % 16;
  for (const Array& array : arrays_) {
    if (array.key == key) return base + array.offset;
  }
  const std::size_t rounded = (bytes + 15) / 16 * 16;
  if (memory_used_ + rounded > kThreadgroupBytes || arrays_.size() == kMaxArrays) {
    fail("threadgroup memory of at most " + std::to_string(kThreadgroupBytes) + " bytes",
         std::to_string(memory_used_ + rounded) + " with " + name, site);
  }
  const std::uint32_t offset = memory_end_;
  arrays_.push_back({key, offset, static_cast<std::uint32_t>(bytes), name, site});
  std::memset(base + offset + bytes, kGuardByte, rounded - bytes + kGuardBytes);
  memory_used_ += static_cast<std::uint32_t>(rounded);
  memory_end_ += static_cast<std::uint32_t>(rounded + kGuardBytes);
  return base + offset;
}

// Behind a threadgroup: checks the guards and fills what was used with garbage.
std::string Worker::reset_memory() {
  unsigned char* base = memory_.get() + (16 - reinterpret_cast<std::uintptr_t>(memory_.get()) % 16) % 16;
  std::string error;
  for (const Array& array : arrays_) {
    const std::size_t guard = (array.bytes + 15) / 16 * 16 - array.bytes + kGuardBytes;
    const std::size_t damaged = first_damaged(base + array.offset + array.bytes, guard);
    if (damaged == guard || !error.empty()) continue;
    error = expected_got(std::string("kernel ") + threadgroup_.kernel->info.name + ", " + place(array.site),
                         "writes within the " + std::to_string(array.bytes) + " bytes of " + array.name,
                         "one at byte " + std::to_string(array.bytes + damaged));
  }
  fill_garbage(base, memory_end_);
  arrays_.clear();
  memory_used_ = memory_end_ = 0;
  return error;
}

}  // namespace expertile::emulator
