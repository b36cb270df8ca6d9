// metal_command.cpp: queues, command buffers and encoders of the fake driver. A dispatch is judged when it is encoded
// and run by the emulator when the command buffer is waited for.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <mutex>

#include "devices/emulator/emulator.h"
#include "devices/launch_check.h"
#include "expertile/error.h"
#include "objects.h"

namespace standin {
namespace {

using expertile::KernelBuffer;
using expertile::KernelInfo;

constexpr unsigned long kBufferSlots = 31, kSetBytes = 4096;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// A buffer as the GPU sees it, for the emulator.
struct GpuView : expertile::Buffer {
  explicit GpuView(const BufferObject& buffer) {
    bytes_ = buffer.length;
    host_ = buffer.gpu;
    address_ = reinterpret_cast<std::uint64_t>(buffer.gpu);
  }
};

const char* name_of(const Dispatch& dispatch) { return dispatch.pipeline->kernel->info.name; }

Object* new_commands(QueueObject* self, SEL) {
  ++counts().command_buffers;
  return autoreleased(make("MTLCommandBuffer", new CommandBufferObject(self->device, "MTLCommandBuffer")));
}

Object* new_encoder(CommandBufferObject* self, SEL, unsigned long type) {
  if (self->committed) fault("computeCommandEncoder after commit");
  if (self->open != nullptr) fault("computeCommandEncoder while another encoder is open: endEncoding is missing");
  ++counts().encoders;
  auto* encoder = make("MTLComputeCommandEncoder", new EncoderObject(self->device, "MTLComputeCommandEncoder"));
  encoder->commands = self;
  encoder->concurrent = type == MTL::DispatchTypeConcurrent;
  self->open = encoder;
  return autoreleased(encoder);
}

void commit(CommandBufferObject* self, SEL) {
  if (self->committed) fault("commit of a command buffer that is committed already");
  if (self->open != nullptr) fault("commit before endEncoding");
  self->committed = true;
}

void wait(CommandBufferObject* self, SEL) {
  if (!self->committed) fault("waitUntilCompleted before commit");
  if (!self->completed) self->execute();
}

unsigned long status(CommandBufferObject* self, SEL) {
  if (!self->committed) return MTL::CommandBufferStatusNotEnqueued;
  if (!self->completed) return MTL::CommandBufferStatusCommitted;
  return self->error.empty() ? MTL::CommandBufferStatusCompleted : MTL::CommandBufferStatusError;
}

Object* command_error(CommandBufferObject* self, SEL) {
  return self->error.empty() ? nullptr : make_error(self->error);
}

double start_time(CommandBufferObject* self, SEL) {
  if (!self->completed) fault("GPUStartTime before the command buffer has completed");
  return self->start;
}
double end_time(CommandBufferObject* self, SEL) {
  if (!self->completed) fault("GPUEndTime before the command buffer has completed");
  return self->end;
}

EncoderObject& live(EncoderObject* self, const char* what) {
  if (self->ended) fault(std::string(what) + " after endEncoding");
  return *self;
}

void end_encoding(EncoderObject* self, SEL) {
  live(self, "endEncoding");
  if (!self->bound.empty()) note_fault("endEncoding: buffers were bound for no dispatch");
  self->ended = true;
  self->commands->open = nullptr;
}

void set_pipeline(EncoderObject* self, SEL, PipelineObject* pipeline) {
  live(self, "setComputePipelineState").pipeline = pipeline;
}

EncoderObject::Binding& slot(EncoderObject* self, unsigned long index, const char* what) {
  live(self, what);
  if (index >= kBufferSlots) fault(std::string(what) + ": index " + std::to_string(index) + ", the last is 30");
  if (self->bound.contains(index)) fault(std::string(what) + ": index " + std::to_string(index) + " is bound twice");
  return self->bound[index];
}

void set_buffer(EncoderObject* self, SEL, BufferObject* buffer, unsigned long offset, unsigned long index) {
  EncoderObject::Binding& binding = slot(self, index, "setBuffer");
  if (buffer == nullptr) fault("setBuffer: nil at index " + std::to_string(index));
  if (offset >= buffer->length) {
    fault("setBuffer: offset " + std::to_string(offset) + " of a buffer of " + std::to_string(buffer->length) +
          " bytes at index " + std::to_string(index));
  }
  if (offset % 4 != 0) fault("setBuffer: offset " + std::to_string(offset) + " is not a multiple of 4");
  binding.buffer = buffer;
  binding.offset = offset;
}

void set_bytes(EncoderObject* self, SEL, const std::byte* bytes, unsigned long length, unsigned long index) {
  EncoderObject::Binding& binding = slot(self, index, "setBytes");
  if (length == 0 || length > kSetBytes) fault("setBytes: " + std::to_string(length) + " bytes, 1 to 4096 are allowed");
  binding.bytes.assign(bytes, bytes + length);
}

void barrier(EncoderObject* self, SEL, unsigned long scope) {
  live(self, "memoryBarrier");
  if (scope != MTL::BarrierScopeBuffers) fault("memoryBarrier: scope " + std::to_string(scope) + " is not buffers");
  ++counts().barriers;
  self->after_barrier = true;
}

void use_resources(EncoderObject* self, SEL, BufferObject* const* buffers, unsigned long count, unsigned long usage) {
  live(self, "useResources");
  if ((usage & MTL::ResourceUsageRead) == 0) fault("useResources without read usage");
  for (unsigned long i = 0; i < count; ++i) {
    if (buffers[i] == nullptr) fault("useResources: nil");
    self->resident.push_back(buffers[i]);
  }
}
void use_resource(EncoderObject* self, SEL selector, BufferObject* buffer, unsigned long usage) {
  use_resources(self, selector, &buffer, 1, usage);
}

// The bindings against the kernel's reflection.
void take_bindings(EncoderObject& encoder, const KernelInfo& info, Dispatch& dispatch) {
  const std::string kernel = "kernel " + std::string(info.name);
  const auto find = [&](unsigned long index, const std::string& name) -> EncoderObject::Binding& {
    const auto found = encoder.bound.find(index);
    if (found == encoder.bound.end())
      fault(kernel + ": buffer " + name + " at index " + std::to_string(index) + " is missing");
    return found->second;
  };
  EncoderObject::Binding& args = find(0, "args");
  if (args.buffer != nullptr) fault(kernel + ": a buffer where setBytes gives the args");
  if (args.bytes.size() != info.args_bytes) {
    fault(kernel + ": args of " + std::to_string(args.bytes.size()) + " bytes, not " + std::to_string(info.args_bytes));
  }
  dispatch.args = args.bytes;
  for (const KernelBuffer& declared : info.buffers) {
    const EncoderObject::Binding& binding = find(declared.index, declared.name);
    if (binding.buffer == nullptr) fault(kernel + ": bytes where buffer " + declared.name + " is declared");
    if (binding.buffer->read_only && !declared.is_const) {
      fault(kernel + ": buffer " + declared.name + " is written, its memory may only be read");
    }
    dispatch.buffers.emplace_back(binding.buffer, binding.offset);
  }
  for (const auto& [index, binding] : encoder.bound) {
    if (index > info.buffers.size()) fault(kernel + ": nothing is declared at index " + std::to_string(index));
  }
  encoder.bound.clear();
}

std::string text(const MTL::Size& size) {
  return "(" + std::to_string(size.width) + ", " + std::to_string(size.height) + ", " + std::to_string(size.depth) +
         ")";
}

void check_threads(const EncoderObject& encoder, const MTL::Size& threads) {
  const KernelInfo& info = encoder.pipeline->kernel->info;
  const std::string kernel = "kernel " + std::string(info.name);
  const unsigned long count = threads.width * threads.height * threads.depth;
  if (count > settings().max_threads) {
    fault(kernel + ": " + std::to_string(count) + " threads a threadgroup, the pipeline allows " +
          std::to_string(settings().max_threads));
  }
  if (count != info.threads || threads.width != count) {
    fault(kernel + ": threadgroups of " + text(threads) + " threads, declared are " + std::to_string(info.threads));
  }
  if (encoder.pipeline->multiple_of_simd_width && count % 32 != 0) fault(kernel + ": threads are no multiple of 32");
}

void add_dispatch(EncoderObject& encoder, Dispatch dispatch, const MTL::Size& threads) {
  if (encoder.pipeline == nullptr) fault("a dispatch without a pipeline");
  dispatch.pipeline = encoder.pipeline;
  check_threads(encoder, threads);
  take_bindings(encoder, encoder.pipeline->kernel->info, dispatch);
  dispatch.after_barrier = encoder.after_barrier || !encoder.concurrent;
  encoder.after_barrier = false;
  ++counts().dispatches;
  if (encoder.pipeline->tensor) ++counts().tensor_dispatches;
  encoder.commands->dispatches.emplace_back(std::move(dispatch), encoder.resident);
}

void dispatch_groups(EncoderObject* self, SEL, MTL::Size groups, MTL::Size threads) {
  live(self, "dispatchThreadgroups");
  if (groups.width == 0 || groups.height == 0 || groups.depth == 0) {
    fault("dispatchThreadgroups: a grid of " + text(groups));
  }
  Dispatch dispatch;
  const std::array<unsigned long, 3> sizes{groups.width, groups.height, groups.depth};
  for (std::size_t i = 0; i < 3; ++i) {
    if (sizes[i] > 0xffffffffu) fault("dispatchThreadgroups: a grid of " + text(groups));
    dispatch.grid[i] = static_cast<std::uint32_t>(sizes[i]);
  }
  add_dispatch(*self, std::move(dispatch), threads);
}

void dispatch_indirect(EncoderObject* self, SEL, BufferObject* buffer, unsigned long offset, MTL::Size threads) {
  live(self, "dispatchThreadgroupsWithIndirectBuffer");
  if (buffer == nullptr) fault("dispatchThreadgroupsWithIndirectBuffer: nil");
  if (offset % 4 != 0 || offset + 12 > buffer->length) {
    fault("dispatchThreadgroupsWithIndirectBuffer: offset " + std::to_string(offset) + " of a buffer of " +
          std::to_string(buffer->length) + " bytes");
  }
  Dispatch dispatch;
  dispatch.indirect = buffer;
  dispatch.indirect_offset = offset;
  add_dispatch(*self, std::move(dispatch), threads);
}

// A range of the GPU's addresses as a dispatch uses it. Metal is told where a binding starts, not where it ends: it
// may reach to the end of its buffer.
struct Use {
  std::uint64_t begin, end;
  bool writes;
  std::string name;
};

// The entries of a table of pointers that are not null, with their numbers.
template <class Each>
void for_each_pointer(const BufferObject& table, std::uint64_t offset, const Each& each) {
  for (std::uint64_t at = offset; at + 8 <= table.length; at += 8) {
    std::uint64_t address;
    std::memcpy(&address, table.gpu + at, 8);
    if (address != 0) each((at - offset) / 8, address);
  }
}

std::vector<Use> uses_of(const Dispatch& dispatch) {
  std::vector<Use> uses;
  const KernelInfo& info = dispatch.pipeline->kernel->info;
  const auto add = [&](const BufferObject& buffer, std::uint64_t offset, std::uint64_t end, bool writes,
                       const std::string& name) {
    const auto start = reinterpret_cast<std::uint64_t>(buffer.gpu);
    uses.push_back({start + offset, start + end, writes, name});
  };
  for (std::size_t i = 0; i < dispatch.buffers.size(); ++i) {
    const auto& [buffer, offset] = dispatch.buffers[i];
    add(*buffer, offset, buffer->length, !info.buffers[i].is_const, info.buffers[i].name);
    if (!info.buffers[i].pointers) continue;
    std::set<const BufferObject*> reached;
    for_each_pointer(*buffer, offset,
                     [&](std::uint64_t, std::uint64_t address) { reached.insert(buffer_at(address)); });
    for (const BufferObject* each : reached) {
      if (each != nullptr)
        add(*each, 0, each->length, false, "what " + std::string(info.buffers[i].name) + " points to");
    }
  }
  if (dispatch.indirect != nullptr) {
    add(*dispatch.indirect, dispatch.indirect_offset, dispatch.indirect_offset + 12, false, "indirect grid");
  }
  return uses;
}

void check_hazards(const Dispatch& first, const std::vector<Use>& before, const Dispatch& second,
                   const std::vector<Use>& uses) {
  for (const Use& b : uses) {
    for (const Use& a : before) {
      if ((a.writes || b.writes) && a.begin < b.end && b.begin < a.end) {
        fault("no memoryBarrier between kernel " + std::string(name_of(first)) + " (" + a.name + ") and kernel " +
              name_of(second) + " (" + b.name + ")");
      }
    }
  }
}

// Every address of a table of pointers lies in a buffer that was made resident.
void check_resident(const Dispatch& dispatch, const std::vector<BufferObject*>& resident) {
  const KernelInfo& info = dispatch.pipeline->kernel->info;
  for (std::size_t i = 0; i < dispatch.buffers.size(); ++i) {
    if (!info.buffers[i].pointers) continue;
    const auto& [table, offset] = dispatch.buffers[i];
    for_each_pointer(*table, offset, [&](std::uint64_t entry, std::uint64_t address) {
      const bool found = std::any_of(resident.begin(), resident.end(), [&](const BufferObject* buffer) {
        return address - reinterpret_cast<std::uint64_t>(buffer->gpu) < buffer->length;
      });
      if (found) return;
      fault("kernel " + std::string(info.name) + ": entry " + std::to_string(entry) + " of " + info.buffers[i].name +
            " points to " + (buffer_at(address) ? "a buffer that is not resident" : "no buffer"));
    });
  }
}

void run_dispatch(const Dispatch& dispatch) {
  static std::mutex mutex;
  static expertile::emulator::Emulator emulator({0, "shuffled", 5});
  const expertile::emulator::LoweredKernel& kernel = *dispatch.pipeline->kernel;
  if (settings().fails_on_the_gpu == kernel.info.name) throw expertile::DeviceError("planted GPU fault");
  expertile::Launch launch;
  launch.kernel = kernel.info.name;
  launch.args = dispatch.args;
  launch.grid.size = dispatch.grid;
  for (std::size_t i = 0; i < dispatch.buffers.size(); ++i) {
    const auto& [buffer, offset] = dispatch.buffers[i];
    if (buffer->references < 0) fault("kernel " + launch.kernel + ": a buffer was freed before the GPU used it");
    const auto access = kernel.info.buffers[i].is_const ? expertile::Access::Read : expertile::Access::ReadWrite;
    launch.buffers.push_back(
        {std::make_shared<GpuView>(*buffer), access, offset, buffer->length - offset, kernel.info.buffers[i].name});
  }
  if (dispatch.indirect != nullptr) {
    launch.grid.indirect = std::make_shared<GpuView>(*dispatch.indirect);
    launch.grid.indirect_offset = dispatch.indirect_offset;
    launch.grid.max_grid = {0x7fffffffu, 0x7fffffffu, 0x7fffffffu};
  }
  const std::lock_guard lock(mutex);
  emulator.run(kernel, launch);
  for (const auto& [buffer, offset] : dispatch.buffers) buffer->check_guards(launch.kernel);
}

}  // namespace

void CommandBufferObject::execute() {
  completed = true;
  start = now();
  std::vector<std::pair<const Dispatch*, std::vector<Use>>> group;  // since the last barrier
  try {
    for (const auto& [dispatch, resident] : dispatches) {
      check_resident(dispatch, resident);
      if (dispatch.after_barrier) group.clear();
      std::vector<Use> uses = uses_of(dispatch);
      for (const auto& [before, used] : group) check_hazards(*before, used, dispatch, uses);
      group.emplace_back(&dispatch, std::move(uses));
      run_dispatch(dispatch);
    }
  } catch (const expertile::DeviceError& failure) {
    error = failure.what();
  }
  end = now();
}

void CommandBufferObject::dispose() {
  if (committed && !completed) note_fault("a command buffer was committed and never waited for");
  Child::dispose();
}

void EncoderObject::dispose() {
  if (!ended) note_fault("a command encoder was released without endEncoding");
  if (!ended) commands->open = nullptr;
  Child::dispose();
}

void define_command_classes() {
  define("MTLCommandQueue", {},
         {method("commandBuffer", &new_commands), method("commandBufferWithUnretainedReferences", &new_commands)});
  define("MTLCommandBuffer", {},
         {method("computeCommandEncoderWithDispatchType:", &new_encoder), method("commit", &commit),
          method("waitUntilCompleted", &wait), method("status", &status), method("error", &command_error),
          method("GPUStartTime", &start_time), method("GPUEndTime", &end_time)});
  define("MTLComputeCommandEncoder", {},
         {method("endEncoding", &end_encoding), method("setComputePipelineState:", &set_pipeline),
          method("setBuffer:offset:atIndex:", &set_buffer), method("setBytes:length:atIndex:", &set_bytes),
          method("memoryBarrierWithScope:", &barrier), method("useResources:count:usage:", &use_resources),
          method("useResource:usage:", &use_resource),
          method("dispatchThreadgroups:threadsPerThreadgroup:", &dispatch_groups),
          method("dispatchThreadgroupsWithIndirectBuffer:indirectBufferOffset:threadsPerThreadgroup:",
                 &dispatch_indirect)});
}

}  // namespace standin
