#include "devices/metal/device.h"

#include <algorithm>
#include <mutex>
#include <vector>

#include "devices/host_buffer.h"
#include "devices/launch_check.h"
#include "devices/metal/libraries.h"
#include "expertile/error.h"
#include "expertile/metal.h"
#include "expertile/program.h"

namespace expertile {
namespace metal {
namespace {

constexpr std::size_t kMostArgs = 4096;  // what setBytes takes

// The encoder of a command buffer; ends also where encoding is left by an exception, as Metal asks.
class Encoding {
 public:
  explicit Encoding(MTL::CommandBuffer& commands)
      : encoder_(commands.computeCommandEncoder(MTL::DispatchTypeConcurrent)) {
    if (encoder_ == nullptr) throw DeviceError(expected_got("metal run", "a compute encoder", "none"));
  }
  ~Encoding() { encoder_->endEncoding(); }
  Encoding(const Encoding&) = delete;
  Encoding& operator=(const Encoding&) = delete;
  MTL::ComputeCommandEncoder* operator->() const { return encoder_; }

 private:
  MTL::ComputeCommandEncoder* encoder_;
};

const MetalBuffer& metal(const BufferRef& buffer) { return static_cast<const MetalBuffer&>(*buffer); }

// The buffers that tables of pointers lead to. Metal makes resident what is bound, and must be told of the rest.
class Reached {
 public:
  explicit Reached(const Context& context) : context_(context) {}

  void add(const Launch& launch, const KernelInfo& kernel) {
    for (std::size_t i = 0; i < launch.buffers.size(); ++i) {
      if (kernel.buffers[i].pointers) add_table(launch, launch.buffers[i]);
    }
  }
  const std::vector<const MTL::Resource*>& resources() const { return resources_; }

 private:
  void add_table(const Launch& launch, const Binding& table) {
    const auto* entries = reinterpret_cast<const std::uint64_t*>(table.buffer->host() + table.offset);
    for (std::uint64_t i = 0; i < table.bytes / 8; ++i) {
      if (entries[i] == 0) continue;  // an expert that is not here, and not chosen
      if (last_ != nullptr && entries[i] - last_begin_ < last_bytes_) continue;
      const MTL::Buffer* buffer = context_.buffer_at(entries[i]);
      if (buffer == nullptr) {
        throw DeviceError(expected_got("kernel " + launch.kernel + ", buffer " + table.name,
                                       "addresses of this device's buffers", "another in entry " + std::to_string(i)));
      }
      last_ = buffer;
      last_begin_ = buffer->gpuAddress();
      last_bytes_ = buffer->length();
      if (std::find(resources_.begin(), resources_.end(), buffer) == resources_.end()) resources_.push_back(buffer);
    }
  }

  const Context& context_;
  std::vector<const MTL::Resource*> resources_;
  const MTL::Buffer* last_ = nullptr;  // neighbouring entries lie in one buffer
  std::uint64_t last_begin_ = 0, last_bytes_ = 0;
};

class MetalDevice final : public Device {
 public:
  MetalDevice(ContextRef context, Matrix matrix, bool chosen)
      : context_(std::move(context)), libraries_(*context_, matrix, chosen) {}
  ~MetalDevice() override = default;

  const char* kind() const override { return "metal"; }
  std::string name() const override { return context_->name(); }

  BufferRef alloc(std::uint64_t bytes, const std::byte* source) override {
    return make_buffer(context_, bytes, source);
  }
  BufferRef wrap(MTL::Buffer* buffer, std::uint64_t offset, std::uint64_t bytes) {
    return std::make_shared<MetalBuffer>(context_, NS::RetainPtr(buffer), offset, bytes);
  }
  void write(const BufferRef& to, std::uint64_t offset, const void* from, std::uint64_t bytes) override {
    host_write("metal write", to, offset, from, bytes);
  }
  void read(const BufferRef& from, std::uint64_t offset, void* to, std::uint64_t bytes) override {
    host_read("metal read", from, offset, to, bytes);
  }

  void prepare(Program& program) override {
    const std::lock_guard lock(mutex_);
    const Pool pool;
    for (Group& group : program.groups) {
      for (Launch& launch : group.launches) {
        const KernelInfo* kernel = find_kernel(launch.kernel);
        if (kernel == nullptr) throw DeviceError(expected_got("metal", "a kernel of metal/kernels", launch.kernel));
        check_launch(launch, *kernel);
        check_run(launch);
        check_metal(launch);
        launch.pipeline = &libraries_.pipeline(*kernel);
      }
    }
    libraries_.save();
  }

  double run(const Program& program) override {
    if (std::all_of(program.groups.begin(), program.groups.end(),
                    [](const Group& group) { return group.launches.empty(); })) {
      return 0;
    }
    const std::lock_guard lock(mutex_);
    const Pool pool;
    // The program's buffers outlive the call, so the command buffer need not keep them.
    MTL::CommandBuffer* commands = context_->queue().commandBufferWithUnretainedReferences();
    if (commands == nullptr) throw DeviceError(expected_got("run: " + program.name, "a command buffer", "none"));
    encode(*commands, program);
    commands->commit();
    commands->waitUntilCompleted();
    if (commands->status() != MTL::CommandBufferStatusCompleted) {
      throw DeviceError(expected_got("run: " + label(program), "the GPU to finish", words(commands->error())));
    }
    return commands->GPUEndTime() - commands->GPUStartTime();
  }

  // Of memory of this device: an MTL::Buffer's GPU address, or one inside it.
  BufferRef adopt(std::uint64_t address, std::uint64_t bytes) override {
    const Pool pool;
    MTL::Buffer* buffer = context_->buffer_at(address);
    const std::uint64_t offset = buffer != nullptr ? address - buffer->gpuAddress() : 0;
    if (buffer == nullptr || bytes == 0 || bytes > buffer->length() - offset) {
      throw std::invalid_argument(
          expected_got("metal adopt", std::to_string(bytes) + " bytes in a buffer of this device", "other memory"));
    }
    return wrap(buffer, offset, bytes);
  }

  std::string take_warning() override {
    const std::lock_guard lock(mutex_);
    return libraries_.take_warning();
  }

 private:
  // The program's name, with the kernel's where it has one launch.
  static std::string label(const Program& program) {
    const bool single = program.groups.size() == 1 && program.groups[0].launches.size() == 1;
    return single ? program.name + ", kernel " + program.groups[0].launches[0].kernel : program.name;
  }

  void check_buffer(const Launch& launch, const BufferRef& buffer, const std::string& name) const {
    const auto* known = dynamic_cast<const MetalBuffer*>(buffer.get());
    if (known == nullptr || &known->context() != context_.get()) {
      throw std::invalid_argument(expected_got("kernel " + launch.kernel + ", buffer " + name,
                                               "a buffer of this device",
                                               known ? "another GPU's" : "another device's"));
    }
  }
  void check_metal(const Launch& launch) const {
    if (launch.args.size() > kMostArgs) {
      throw DeviceError(expected_got("kernel " + launch.kernel,
                                     "args of at most " + std::to_string(kMostArgs) + " bytes", launch.args.size()));
    }
    for (const Binding& binding : launch.buffers) check_buffer(launch, binding.buffer, binding.name);
    if (launch.grid.indirect != nullptr) check_buffer(launch, launch.grid.indirect, "indirect grid");
  }

  void encode(MTL::CommandBuffer& commands, const Program& program) const {
    Reached reached(*context_);
    for (const Group& group : program.groups) {
      for (const Launch& launch : group.launches) {
        if (launch.pipeline == nullptr) throw DeviceError(expected_got("metal", "a prepared program", launch.kernel));
        check_run(launch);
        reached.add(launch, *static_cast<const Pipeline*>(launch.pipeline)->kernel);
      }
    }
    const Encoding encoder(commands);
    const auto& resources = reached.resources();
    if (!resources.empty()) encoder->useResources(resources.data(), resources.size(), MTL::ResourceUsageRead);
    bool first = true;
    for (const Group& group : program.groups) {
      if (!first) encoder->memoryBarrier(MTL::BarrierScopeBuffers);
      first = false;
      for (const Launch& launch : group.launches) encode(encoder, launch);
    }
  }

  static void encode(const Encoding& encoder, const Launch& launch) {
    const Pipeline& pipeline = *static_cast<const Pipeline*>(launch.pipeline);
    encoder->setComputePipelineState(pipeline.state.get());
    encoder->setBytes(launch.args.data(), launch.args.size(), 0);
    for (std::size_t i = 0; i < launch.buffers.size(); ++i) {
      const MetalBuffer& buffer = metal(launch.buffers[i].buffer);
      encoder->setBuffer(buffer.buffer(), buffer.offset() + launch.buffers[i].offset,
                         pipeline.kernel->buffers[i].index);
    }
    const MTL::Size threads(pipeline.kernel->threads, 1, 1);
    const Grid& grid = launch.grid;
    if (grid.indirect != nullptr) {
      const MetalBuffer& words = metal(grid.indirect);
      encoder->dispatchThreadgroups(words.buffer(), words.offset() + grid.indirect_offset, threads);
    } else {
      encoder->dispatchThreadgroups(MTL::Size(grid.size[0], grid.size[1], grid.size[2]), threads);
    }
  }

  std::mutex mutex_;  // one queue, one call at a time
  ContextRef context_;
  Libraries libraries_;
};

// Why the kernels cannot run on this GPU; "" = they can.
std::string absence(MTL::Device* device) {
  if (device == nullptr) return "this machine has no GPU that Metal knows";
  if (!device->supportsFamily(MTL::GPUFamilyApple7)) {
    return std::string(device->name()->utf8String()) + " is not of the family Apple7 (M1) or later";
  }
  if (!system_is_at_least(14, 0)) return "macOS 14 is needed";
  return "";
}

}  // namespace
}  // namespace metal

DeviceStatus metal_status() {
  const metal::Pool pool;
  const auto device = NS::TransferPtr(MTL::CreateSystemDefaultDevice());
  const std::string why = metal::absence(device.get());
  return {"metal", why.empty(), why.empty() ? device->name()->utf8String() : why};
}

std::shared_ptr<Device> open_metal_device(const MetalOptions& options) {
  const metal::Pool pool;
  const metal::Matrix wanted = metal::matrix_of(options.matrix);
  const auto device = options.device != nullptr ? NS::RetainPtr(static_cast<MTL::Device*>(options.device))
                                                : NS::TransferPtr(MTL::CreateSystemDefaultDevice());
  const std::string why = metal::absence(device.get());
  if (!why.empty()) throw DeviceError(expected_got("open_device: metal", "an Apple GPU", why));
  auto context = std::make_shared<metal::Context>(device.get(), static_cast<MTL::CommandQueue*>(options.queue));
  const bool chosen = !options.matrix.empty();
  const bool can = metal::has_tensor_units(*context);
  if (chosen && wanted != metal::Matrix::Base && !can) {
    throw DeviceError(expected_got("open_device: metal: matrix " + options.matrix,
                                   "a GPU with neural accelerators (M5) on macOS 26.2 or later", context->name()));
  }
  const metal::Matrix matrix = can ? wanted : metal::Matrix::Base;
  return std::make_shared<metal::MetalDevice>(std::move(context), matrix, chosen);
}

BufferRef metal_buffer(Device& device, void* buffer, std::uint64_t offset, std::uint64_t bytes) {
  const metal::Pool pool;
  auto* own = dynamic_cast<metal::MetalDevice*>(&device);
  if (own == nullptr) throw std::invalid_argument(expected_got("metal_buffer", "a metal device", device.kind()));
  auto* handle = static_cast<MTL::Buffer*>(buffer);
  if (handle == nullptr) throw std::invalid_argument(expected_got("metal_buffer", "a buffer", "nullptr"));
  const std::uint64_t length = handle->length();
  if (offset >= length || bytes > length - offset || offset % 16 != 0) {
    throw std::invalid_argument(
        expected_got("metal_buffer", "a range within " + std::to_string(length) + " bytes, its offset a multiple of 16",
                     std::to_string(bytes) + " bytes at " + std::to_string(offset)));
  }
  if (handle->contents() == nullptr) {
    throw std::invalid_argument(expected_got("metal_buffer", "shared storage", "storage that the host cannot see"));
  }
  return own->wrap(handle, offset, bytes != 0 ? bytes : length - offset);
}

MetalRange metal_handle(const BufferRef& buffer) {
  const auto* known = dynamic_cast<const metal::MetalBuffer*>(buffer.get());
  if (known == nullptr)
    throw std::invalid_argument(expected_got("metal_handle", "a buffer of a metal device", "another"));
  return {known->buffer(), known->offset()};
}

}  // namespace expertile
