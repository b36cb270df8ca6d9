// objects.h: the objects of the fake Metal driver.
#pragma once

#include <Metal/Metal.hpp>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "devices/emulator/lowered.h"
#include "expertile/device.h"
#include "expertile/program.h"
#include "foundation.h"
#include "standin.h"

namespace standin {

struct DeviceObject : Object {
  void dispose() override;
  std::map<std::string, long> children;  // living, by class
};

// An object that a device made; one that outlives its device's last reference is a leak.
struct Child : Object {
  Child(DeviceObject* maker, const char* class_name) : device(maker), kind(class_name) { ++device->children[kind]; }
  void dispose() override { --device->children[kind]; }
  DeviceObject* device;
  const char* kind;
};

// A buffer's memory has two addresses, the host's and the GPU's, so that neither passes for the other. Adopted memory
// has one.
struct BufferObject : Child {
  BufferObject(DeviceObject* device, std::uint64_t bytes);                                     // memory of its own
  BufferObject(DeviceObject* device, std::byte* memory, std::uint64_t bytes, bool read_only);  // adopted
  void dispose() override;
  // Throws a fault naming `kernel` where a guard word around the memory was written.
  void check_guards(const std::string& kernel) const;

  std::uint64_t length;
  std::byte* contents = nullptr;
  std::byte* gpu = nullptr;
  bool read_only = false;
  std::byte* host_mapping = nullptr;
  std::byte* gpu_mapping = nullptr;  // nullptr = adopted
  std::uint64_t mapped = 0;
};
// The living buffer that holds a GPU address; nullptr = none.
BufferObject* buffer_at(std::uint64_t gpu_address);

struct CompileOptions : Object {
  void dispose() override;
  unsigned long language = 0;  // MTL::LanguageVersion; 0 = the system's newest
  bool safe_math = false;
  Object* macros = nullptr;
};

struct LibraryObject : Child {
  using Child::Child;
  std::string file;
  std::string form;  // "", " tensor" or " k4"
};

struct FunctionObject : Child {
  using Child::Child;
  const expertile::emulator::LoweredKernel* kernel = nullptr;
  std::string form;
  std::string key() const { return kernel->info.name + form; }
};

struct ArchiveDescriptor : Object {
  void dispose() override {
    if (url != nullptr) release(url);
  }
  URL* url = nullptr;
};

struct ArchiveObject : Child {
  using Child::Child;
  std::set<std::string> keys;
};

struct PipelineDescriptor : Object {
  void dispose() override;
  FunctionObject* function = nullptr;
  Array* archives = nullptr;
  bool multiple_of_simd_width = false;
};

struct PipelineObject : Child {
  using Child::Child;
  const expertile::emulator::LoweredKernel* kernel = nullptr;
  bool tensor = false;
  bool multiple_of_simd_width = false;
};

struct QueueObject : Child {
  using Child::Child;
};

// One dispatch with all that was bound when it was encoded.
struct Dispatch {
  PipelineObject* pipeline = nullptr;
  std::vector<std::byte> args;
  std::vector<std::pair<BufferObject*, std::uint64_t>> buffers;  // with their offsets, in kernel order
  std::array<std::uint32_t, 3> grid{};
  BufferObject* indirect = nullptr;
  std::uint64_t indirect_offset = 0;
  bool after_barrier = false;  // a memoryBarrier, or a new encoder, lies before it
};

struct EncoderObject;

struct CommandBufferObject : Child {
  using Child::Child;
  void dispose() override;
  void execute();

  EncoderObject* open = nullptr;
  bool committed = false, completed = false;
  std::string error;
  double start = 0, end = 0;
  std::vector<std::pair<Dispatch, std::vector<BufferObject*>>> dispatches;  // and what is resident for each
};

struct EncoderObject : Child {
  using Child::Child;
  void dispose() override;

  struct Binding {
    BufferObject* buffer = nullptr;
    std::uint64_t offset = 0;
    std::vector<std::byte> bytes;
  };
  CommandBufferObject* commands = nullptr;
  bool ended = false;
  bool concurrent = false;
  bool after_barrier = true;
  PipelineObject* pipeline = nullptr;
  std::map<unsigned long, Binding> bound;  // since the last dispatch
  std::vector<BufferObject*> resident;
};

void define_command_classes();
void define_library_classes();
Object* new_library(DeviceObject* self, SEL, String* source, CompileOptions* options, Error** error);
Object* new_pipeline(DeviceObject* self, SEL, PipelineDescriptor* descriptor, unsigned long options, const void*,
                     Error** error);
Object* new_archive(DeviceObject* self, SEL, ArchiveDescriptor* descriptor, Error** error);

}  // namespace standin
