// context.h: one GPU with its queue, and the buffers that live on it.
#pragma once

#include <Metal/Metal.hpp>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "expertile/device.h"

namespace expertile::metal {

// What Metal returns without `new` or `alloc` in the call's name lives until this goes.
class Pool {
 public:
  Pool() : pool_(NS::AutoreleasePool::alloc()->init()) {}
  ~Pool() { pool_->release(); }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

 private:
  NS::AutoreleasePool* pool_;
};

inline NS::String* text(const char* utf8) { return NS::String::string(utf8, NS::UTF8StringEncoding); }
// The words of an error; `error` may be nullptr.
std::string words(const NS::Error* error);
// Is the system this version of macOS or a later one?
bool system_is_at_least(NS::Integer major, NS::Integer minor);

class MetalBuffer;

// Kept by everything that lives on the GPU, so that none outlives it.
class Context {
 public:
  // Retains both; makes a queue where there is none.
  Context(MTL::Device* device, MTL::CommandQueue* queue);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  MTL::Device& device() const { return *device_.get(); }
  MTL::CommandQueue& queue() const { return *queue_.get(); }
  const std::string& name() const { return name_; }

  void add(MetalBuffer& buffer);
  void remove(MetalBuffer& buffer);
  // The buffer that holds a GPU address; nullptr = none.
  MTL::Buffer* buffer_at(std::uint64_t address) const;

 private:
  NS::SharedPtr<MTL::Device> device_;
  NS::SharedPtr<MTL::CommandQueue> queue_;
  std::string name_;
  mutable std::mutex mutex_;
  std::multimap<std::uint64_t, MetalBuffer*> buffers_;  // by first address
};

using ContextRef = std::shared_ptr<Context>;

// A range of an MTL::Buffer.
class MetalBuffer final : public Buffer {
 public:
  MetalBuffer(ContextRef context, NS::SharedPtr<MTL::Buffer> buffer, std::uint64_t offset, std::uint64_t bytes);
  ~MetalBuffer() override;
  MetalBuffer(const MetalBuffer&) = delete;
  MetalBuffer& operator=(const MetalBuffer&) = delete;

  const Context& context() const { return *context_; }
  MTL::Buffer* buffer() const { return buffer_.get(); }
  std::uint64_t offset() const { return offset_; }

 private:
  ContextRef context_;
  NS::SharedPtr<MTL::Buffer> buffer_;
  std::uint64_t offset_;
};

// `bytes` of shared memory. With `source`: that memory itself where it may be adopted, else a copy of it.
BufferRef make_buffer(const ContextRef& context, std::uint64_t bytes, const std::byte* source);

}  // namespace expertile::metal
