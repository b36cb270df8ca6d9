// metal.h: the Metal device inside a server that has its own MTL::Device, queue and buffers.
//
// Handles are the Objective-C objects as void*, so that no Metal header is needed here: `(__bridge void*)device` from
// Objective-C, the pointer itself from metal-cpp. The engine retains what it keeps.
//
//   MTL::Device* gpu = ...;                       // the server's
//   MTL::CommandQueue* queue = ...;
//   auto device = expertile::open_metal_device({gpu, queue, ""});
//   auto model = std::make_shared<const expertile::Model>(expertile::open_gguf("model.gguf"));
//   expertile::Window window(model, device, {.max_tokens = 2048});
//
//   // The streams [T, C, D] fp32 that the server's attention left in a buffer of its own, offset 0.
//   expertile::BufferRef streams = expertile::metal_buffer(*device, server_buffer, 0, n_tokens * C * D * 4);
//   std::memcpy(window.buffer("streams")->host(), streams->host(), streams->bytes());
//   window.clear_faults(n_tokens);                // before a chunk's first layer
//   window.moe_layer(layer, n_tokens);            // returns when the GPU has finished
//   // or hand the window's own buffer to the server's kernels:
//   auto [handle, offset] = expertile::metal_handle(window.buffer("streams"));
//   encoder->setBuffer(static_cast<MTL::Buffer*>(handle), offset, 0);
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "expertile/device.h"

namespace expertile {

struct MetalOptions {
  void* device = nullptr;  // id<MTLDevice>; nullptr = the system's
  void* queue = nullptr;   // id<MTLCommandQueue> of that device; nullptr = the engine makes one
  // What multiplies matrices: "base" (simdgroup_matrix), or matmul2d, for GPUs with neural accelerators, its weights
  // "staged" in threadgroup memory or "k4" straight into registers. "" = staged where it compiles, else base, and said
  // once (Device::take_warning).
  std::string matrix;
};

// Throws DeviceError where this build has no Metal or the GPU lacks what the kernels or `matrix` need,
// std::invalid_argument for another word.
std::shared_ptr<Device> open_metal_device(const MetalOptions& options);

// A range of the server's id<MTLBuffer> as a buffer of the engine. Its storage must be shared; `offset` a multiple
// of 16. bytes = 0: to its end.
BufferRef metal_buffer(Device& device, void* buffer, std::uint64_t offset = 0, std::uint64_t bytes = 0);

struct MetalRange {
  void* buffer = nullptr;  // id<MTLBuffer>, retained by the engine as long as its buffer lives
  std::uint64_t offset = 0;
};

// Where a buffer of a Metal device lies.
MetalRange metal_handle(const BufferRef& buffer);

}  // namespace expertile
