#include "devices/metal/context.h"

#include <unistd.h>

#include <cstring>

#include "expertile/error.h"

namespace expertile::metal {
namespace {

// The engine puts its own barriers, and one program runs at a time: Metal need not track what a buffer waits for.
constexpr MTL::ResourceOptions kOptions = MTL::ResourceStorageModeShared | MTL::ResourceHazardTrackingModeUntracked;

// Memory that is smaller costs less to copy than pages cost to wire.
constexpr std::uint64_t kLeastAdopted = 64 << 10;
// Kernels read weights by vectors of 16 bytes.
constexpr std::uint64_t kAlignment = 16;

// The whole pages around `source` as a buffer, or nullptr where it must be copied.
BufferRef adopt(const ContextRef& context, std::uint64_t bytes, const std::byte* source) {
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<std::uint64_t>(source);
  if (bytes < kLeastAdopted || address % kAlignment != 0) return nullptr;
  const std::uint64_t first = address / page * page;
  const std::uint64_t end = (address + bytes + page - 1) / page * page;
  MTL::Device& device = context->device();
  if (end - first > device.maxBufferLength()) return nullptr;
  auto buffer = NS::TransferPtr(device.newBuffer(reinterpret_cast<const void*>(first), end - first, kOptions, nullptr));
  if (!buffer) return nullptr;
  return std::make_shared<MetalBuffer>(context, std::move(buffer), address - first, bytes);
}

}  // namespace

std::string words(const NS::Error* error) {
  if (error == nullptr) return "no reason given";
  const NS::String* description = error->localizedDescription();
  return description != nullptr ? description->utf8String() : "no reason given";
}

bool system_is_at_least(NS::Integer major, NS::Integer minor) {
  return NS::ProcessInfo::processInfo()->isOperatingSystemAtLeastVersion({major, minor, 0});
}

Context::Context(MTL::Device* device, MTL::CommandQueue* queue)
    : device_(NS::RetainPtr(device)),
      queue_(queue != nullptr ? NS::RetainPtr(queue) : NS::TransferPtr(device->newCommandQueue())),
      name_(device->name()->utf8String()) {
  if (!queue_) throw DeviceError(expected_got("metal", "a command queue of " + name_, "none"));
}

Context::~Context() {
  const Pool pool;
  queue_.reset();
  device_.reset();
}

void Context::add(MetalBuffer& buffer) {
  const std::lock_guard lock(mutex_);
  buffers_.emplace(buffer.address(), &buffer);
}

void Context::remove(MetalBuffer& buffer) {
  const std::lock_guard lock(mutex_);
  const auto [first, end] = buffers_.equal_range(buffer.address());
  for (auto it = first; it != end; ++it) {
    if (it->second != &buffer) continue;
    buffers_.erase(it);
    return;
  }
}

MTL::Buffer* Context::buffer_at(std::uint64_t address) const {
  const std::lock_guard lock(mutex_);
  auto it = buffers_.upper_bound(address);
  if (it == buffers_.begin()) return nullptr;
  // Ranges of one MTL::Buffer may overlap, and it is the whole of it that counts.
  MTL::Buffer* buffer = std::prev(it)->second->buffer();
  return address - buffer->gpuAddress() < buffer->length() ? buffer : nullptr;
}

MetalBuffer::MetalBuffer(ContextRef context, NS::SharedPtr<MTL::Buffer> buffer, std::uint64_t offset,
                         std::uint64_t bytes)
    : context_(std::move(context)), buffer_(std::move(buffer)), offset_(offset) {
  bytes_ = bytes;
  host_ = static_cast<std::byte*>(buffer_->contents()) + offset;
  address_ = buffer_->gpuAddress() + offset;
  context_->add(*this);
}

MetalBuffer::~MetalBuffer() {
  context_->remove(*this);
  const Pool pool;
  buffer_.reset();
}

BufferRef make_buffer(const ContextRef& context, std::uint64_t bytes, const std::byte* source) {
  const Pool pool;
  if (bytes == 0) throw std::invalid_argument(expected_got("metal alloc", "at least 1 byte", 0));
  if (source != nullptr) {
    if (BufferRef adopted = adopt(context, bytes, source)) return adopted;
  }
  MTL::Device& device = context->device();
  if (bytes > device.maxBufferLength()) {
    throw DeviceError(
        expected_got("metal alloc", "at most " + std::to_string(device.maxBufferLength()) + " bytes a buffer", bytes));
  }
  auto buffer = NS::TransferPtr(device.newBuffer(bytes, kOptions));
  if (!buffer) {
    const std::uint64_t whole = device.recommendedMaxWorkingSetSize(), used = device.currentAllocatedSize();
    throw DeviceError(expected_got("metal alloc", std::to_string(bytes) + " bytes of memory",
                                   std::to_string(used) + " used of " + std::to_string(whole)));
  }
  if (source != nullptr) std::memcpy(buffer->contents(), source, bytes);
  return std::make_shared<MetalBuffer>(context, std::move(buffer), 0, bytes);
}

}  // namespace expertile::metal
