// archive.h: compiled pipelines on disk, so that a process compiles only what none before it has compiled.
#pragma once

#include <Metal/Metal.hpp>
#include <filesystem>

#include "devices/metal/context.h"

namespace expertile::metal {

// Its file is named after the sources, the system's version and the GPU. Whatever goes wrong with it costs time, and is
// no error.
class Archive {
 public:
  explicit Archive(const Context& context);

  // A pipeline as the archive has it, after adding it where it was not there. nullptr, with `error` set: it does not
  // compile.
  NS::SharedPtr<MTL::ComputePipelineState> pipeline(const Context& context, MTL::ComputePipelineDescriptor& descriptor,
                                                    NS::Error** error);
  // Writes what was added since the last call.
  void save();

 private:
  std::filesystem::path path_;  // empty = there is no home
  NS::SharedPtr<MTL::BinaryArchive> archive_;
  bool loaded_ = false;  // holds what an earlier process compiled
  bool changed_ = false;
};

}  // namespace expertile::metal
