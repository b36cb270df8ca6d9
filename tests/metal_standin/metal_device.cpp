// metal_device.cpp: the fake driver's device and its buffers.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <mutex>
#include <sstream>

#include "devices/garbage.h"
#include "objects.h"

namespace standin {
namespace {

struct Addresses {
  std::mutex mutex;
  std::map<std::uint64_t, BufferObject*> buffers;
};
Addresses& addresses() {
  static auto* all = new Addresses;
  return *all;
}

std::uint64_t page_bytes() { return static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE)); }

constexpr unsigned long kUsual = 0, kUntracked = 1ul << 8;  // shared storage with and without hazard tracking

void check_options(const char* what, unsigned long options) {
  if (options != kUsual && options != kUntracked) {
    fault(std::string(what) + ": resource options " + std::to_string(options) + ", not shared storage");
  }
}

// Whether every page of the range is mapped; `writable`: may be written too.
bool is_mapped(const std::byte* memory, std::uint64_t bytes, bool& writable) {
  auto at = reinterpret_cast<std::uint64_t>(memory);
  const std::uint64_t end = at + bytes;
  writable = true;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; at < end && std::getline(maps, line);) {
    unsigned long from = 0, to = 0;
    char rights[5] = {};
    if (std::sscanf(line.c_str(), "%lx-%lx %4s", &from, &to, rights) != 3) continue;
    if (to <= at) continue;
    if (from > at || rights[0] != 'r') return false;
    writable &= rights[1] == 'w';
    at = to;
  }
  return at >= end;
}

Object* new_buffer(DeviceObject* self, SEL, unsigned long length, unsigned long options) {
  check_options("newBufferWithLength", options);
  if (length == 0) fault("newBufferWithLength: 0 bytes");
  if (length > settings().max_buffer_bytes) fault("newBufferWithLength: more than maxBufferLength");
  counts().copied_bytes += length;
  auto* buffer = make("MTLBuffer", new BufferObject(self, length));
  if (buffer->contents != nullptr) return buffer;
  release(buffer);
  return nullptr;  // as Metal where there is no memory
}

Object* new_no_copy(DeviceObject* self, SEL, std::byte* memory, unsigned long length, unsigned long options,
                    void* deallocator) {
  check_options("newBufferWithBytesNoCopy", options);
  if (deallocator != nullptr) fault("newBufferWithBytesNoCopy: a deallocator, which the stand-in does not call");
  const std::uint64_t page = page_bytes();
  if (reinterpret_cast<std::uintptr_t>(memory) % page != 0) {
    fault("newBufferWithBytesNoCopy: the pointer is not page-aligned");
  }
  if (length == 0 || length % page != 0) fault("newBufferWithBytesNoCopy: the length is not a multiple of the page");
  if (length > settings().max_buffer_bytes) fault("newBufferWithBytesNoCopy: more than maxBufferLength");
  bool writable = false;
  if (!is_mapped(memory, length, writable)) fault("newBufferWithBytesNoCopy: the range is not mapped memory");
  if (!settings().no_copy) return nullptr;
  counts().adopted_bytes += length;
  return make("MTLBuffer", new BufferObject(self, memory, length, !writable));
}

Object* new_queue(DeviceObject* self, SEL) { return make("MTLCommandQueue", new QueueObject(self, "MTLCommandQueue")); }

String* device_name(DeviceObject*, SEL) { return make_string("Apple stand-in"); }
bool supports_family(DeviceObject*, SEL, long family) { return family >= 1001 && family <= settings().family; }
unsigned long max_buffer_length(DeviceObject*, SEL) { return settings().max_buffer_bytes; }
unsigned long max_threadgroup_memory(DeviceObject*, SEL) { return settings().threadgroup_bytes; }
unsigned long working_set(DeviceObject*, SEL) { return settings().max_buffer_bytes; }
unsigned long allocated(DeviceObject*, SEL) { return 0; }

std::byte* buffer_contents(BufferObject* self, SEL) { return self->contents; }
unsigned long buffer_length(BufferObject* self, SEL) { return self->length; }
std::uint64_t buffer_address(BufferObject* self, SEL) { return reinterpret_cast<std::uint64_t>(self->gpu); }
Object* buffer_device(BufferObject* self, SEL) { return self->device; }

}  // namespace

Settings& settings() {
  static Settings now;
  return now;
}

Counts& counts() {
  static Counts now;
  return now;
}

void DeviceObject::dispose() {
  std::ostringstream leaked;
  for (const auto& [name, count] : children) {
    if (count != 0) leaked << (leaked.str().empty() ? "" : ", ") << count << " " << name;
  }
  if (!leaked.str().empty()) note_fault("leak: the device's last reference is gone, alive are " + leaked.str());
}

BufferObject::BufferObject(DeviceObject* device, std::uint64_t bytes) : Child(device, "MTLBuffer"), length(bytes) {
  const std::uint64_t page = page_bytes();
  mapped = page + (bytes + expertile::kGuardBytes + page - 1) / page * page;
  const int file = ::memfd_create("metal-standin", 0);
  if (file < 0 || ::ftruncate(file, static_cast<off_t>(mapped)) != 0) {
    if (file >= 0) ::close(file);
    return;
  }
  const auto map = [&] {
    void* memory = ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    return memory == MAP_FAILED ? nullptr : static_cast<std::byte*>(memory);
  };
  host_mapping = map();
  gpu_mapping = map();
  ::close(file);
  if (host_mapping == nullptr || gpu_mapping == nullptr) return;
  contents = host_mapping + page;
  gpu = gpu_mapping + page;
  expertile::fill_garbage(contents, bytes);
  std::memset(contents - expertile::kGuardBytes, expertile::kGuardByte, expertile::kGuardBytes);
  std::memset(contents + bytes, expertile::kGuardByte, expertile::kGuardBytes);
  const std::lock_guard lock(addresses().mutex);
  addresses().buffers[reinterpret_cast<std::uint64_t>(gpu)] = this;
}

BufferObject::BufferObject(DeviceObject* device, std::byte* memory, std::uint64_t bytes, bool is_read_only)
    : Child(device, "MTLBuffer"), length(bytes), contents(memory), gpu(memory), read_only(is_read_only) {
  const std::lock_guard lock(addresses().mutex);
  addresses().buffers[reinterpret_cast<std::uint64_t>(gpu)] = this;
}

void BufferObject::dispose() {
  Child::dispose();
  {
    const std::lock_guard lock(addresses().mutex);
    const auto found = addresses().buffers.find(reinterpret_cast<std::uint64_t>(gpu));
    if (found != addresses().buffers.end() && found->second == this) addresses().buffers.erase(found);
  }
  if (host_mapping != nullptr) ::munmap(host_mapping, mapped);
  if (gpu_mapping != nullptr) ::munmap(gpu_mapping, mapped);
}

void BufferObject::check_guards(const std::string& kernel) const {
  if (gpu_mapping == nullptr) return;
  const std::size_t behind = expertile::first_damaged(contents + length, expertile::kGuardBytes);
  if (behind != expertile::kGuardBytes) {
    fault("kernel " + kernel + " wrote at byte " + std::to_string(length + behind) + " of a buffer of " +
          std::to_string(length));
  }
  if (expertile::first_damaged(contents - expertile::kGuardBytes, expertile::kGuardBytes) != expertile::kGuardBytes) {
    fault("kernel " + kernel + " wrote before a buffer of " + std::to_string(length) + " bytes");
  }
}

BufferObject* buffer_at(std::uint64_t gpu_address) {
  const std::lock_guard lock(addresses().mutex);
  // Adopted buffers may overlap by a page: any that holds the address will do, the nearest start first.
  auto it = addresses().buffers.upper_bound(gpu_address);
  for (int tries = 0; tries < 4 && it != addresses().buffers.begin(); ++tries) {
    --it;
    if (gpu_address - it->first < it->second->length) return it->second;
  }
  return nullptr;
}

void define_metal() {
  define("MTLDevice", {},
         {method("newBufferWithLength:options:", &new_buffer),
          method("newBufferWithBytesNoCopy:length:options:deallocator:", &new_no_copy),
          method("newCommandQueue", &new_queue), method("newLibraryWithSource:options:error:", &new_library),
          method("newComputePipelineStateWithDescriptor:options:reflection:error:", &new_pipeline),
          method("newBinaryArchiveWithDescriptor:error:", &new_archive), method("name", &device_name),
          method("supportsFamily:", &supports_family), method("maxBufferLength", &max_buffer_length),
          method("maxThreadgroupMemoryLength", &max_threadgroup_memory),
          method("recommendedMaxWorkingSetSize", &working_set), method("currentAllocatedSize", &allocated)});
  define("MTLBuffer", {},
         {method("contents", &buffer_contents), method("length", &buffer_length), method("gpuAddress", &buffer_address),
          method("device", &buffer_device)});
  define_library_classes();
  define_command_classes();
}

}  // namespace standin

extern "C" {
MTL::Device* MTLCreateSystemDefaultDevice() {
  if (!standin::settings().present) return nullptr;
  return reinterpret_cast<MTL::Device*>(standin::make("MTLDevice", new standin::DeviceObject));
}
NS::Array* MTLCopyAllDevices() { standin::fault("MTLCopyAllDevices is not stood in for"); }
NS::Array* MTLCopyAllDevicesWithObserver(NS::Object**, MTL::DeviceNotificationHandlerBlock) {
  standin::fault("MTLCopyAllDevicesWithObserver is not stood in for");
}
void MTLRemoveDeviceObserver(const NS::Object*) { standin::fault("MTLRemoveDeviceObserver is not stood in for"); }
}
