// rig.h: what the planted misuses start from: a device, a queue and a kernel, all of it right.
#pragma once

#include <Metal/Metal.hpp>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "args.h"
#include "devices/metal/context.h"
#include "devices/metal/sources.h"
#include "expertile/error.h"
#include "runtime.h"

namespace standin {

using expertile::metal::Pool;
using expertile::metal::text;

constexpr MTL::ResourceOptions kShared = MTL::ResourceStorageModeShared;

inline const char* source_of(const std::string& file) {
  for (const expertile::metal::Source& source : expertile::metal::sources()) {
    if (file == source.file) return source.text;
  }
  fault("no embedded source " + file);
}

// A device with mm_clear ready: 300 rows in `rows` and `weights`.
struct Rig {
  std::optional<Pool> pool{std::in_place};  // goes first: what it holds was made by the device
  NS::SharedPtr<MTL::Device> device = NS::TransferPtr(MTL::CreateSystemDefaultDevice());
  NS::SharedPtr<MTL::CommandQueue> queue = NS::TransferPtr(device->newCommandQueue());
  NS::SharedPtr<MTL::CompileOptions> options = NS::TransferPtr(MTL::CompileOptions::alloc()->init());
  NS::SharedPtr<MTL::Buffer> rows = buffer(1200), weights = buffer(1200);
  NS::SharedPtr<MTL::ComputePipelineState> clear;
  MTL::CommandBuffer* commands = queue->commandBuffer();
  MTL::ComputeCommandEncoder* encoder = nullptr;
  MTL::Size threads{256, 1, 1}, grid{2, 1, 1};

  Rig() {
    options->setMathMode(MTL::MathModeSafe);
    options->setLanguageVersion(MTL::LanguageVersion3_1);
    clear = pipeline("plan.metal", "mm_clear");
  }
  ~Rig() { pool.reset(); }
  Rig(const Rig&) = delete;
  Rig& operator=(const Rig&) = delete;

  NS::SharedPtr<MTL::Buffer> buffer(std::uint64_t bytes) { return NS::TransferPtr(device->newBuffer(bytes, kShared)); }

  NS::SharedPtr<MTL::ComputePipelineState> pipeline(const char* file, const char* name) {
    NS::Error* error = nullptr;
    const auto library = NS::TransferPtr(device->newLibrary(text(source_of(file)), options.get(), &error));
    const auto function = NS::TransferPtr(library->newFunction(text(name)));
    const auto descriptor = NS::TransferPtr(MTL::ComputePipelineDescriptor::alloc()->init());
    descriptor->setComputeFunction(function.get());
    return NS::TransferPtr(device->newComputePipelineState(descriptor.get(), MTL::PipelineOptionNone, nullptr, &error));
  }

  MTL::ComputeCommandEncoder* encode() {
    encoder = commands->computeCommandEncoder(MTL::DispatchTypeConcurrent);
    encoder->setComputePipelineState(clear.get());
    return encoder;
  }
  void set_args() {
    expertile::args::PlanArgs args{};
    args.max_rows = 300;
    encoder->setBytes(&args, sizeof(args), 0);
  }
  void bind() {
    set_args();
    encoder->setBuffer(rows.get(), 0, 1);
    encoder->setBuffer(weights.get(), 0, 2);
  }
  void dispatch() {
    bind();
    encoder->dispatchThreadgroups(grid, threads);
  }
  void finish() {
    encoder->endEncoding();
    commands->commit();
    commands->waitUntilCompleted();
    if (commands->error() != nullptr) throw expertile::DeviceError(expertile::metal::words(commands->error()));
  }
  void compile(const char* source) {
    NS::Error* error = nullptr;
    const auto library = NS::TransferPtr(device->newLibrary(text(source), options.get(), &error));
    if (!library) throw expertile::DeviceError(expertile::metal::words(error));
  }
};

using Plants = std::map<std::string, std::function<void()>>;
Plants encoder_plants();
Plants memory_plants();
Plants library_plants();

}  // namespace standin
