#include "devices/metal/archive.h"

#include <unistd.h>

#include <string>
#include <vector>

#include "devices/disk_cache.h"
#include "devices/metal/sources.h"

namespace expertile::metal {
namespace {

namespace fs = std::filesystem;

fs::path archive_path(const Context& context) {
  const fs::path folder = cache_directory("metal");
  if (folder.empty()) return folder;
  std::vector<std::string> texts = {context.name(),
                                    NS::ProcessInfo::processInfo()->operatingSystemVersionString()->utf8String()};
  for (const Source& source : sources()) texts.push_back(source.text);
  return folder / (cache_key(texts) + ".metalarchive");
}

NS::SharedPtr<MTL::BinaryArchive> open(const Context& context, const fs::path& path) {
  const auto descriptor = NS::TransferPtr(MTL::BinaryArchiveDescriptor::alloc()->init());
  if (!path.empty()) descriptor->setUrl(NS::URL::fileURLWithPath(text(path.c_str())));
  NS::Error* ignored = nullptr;
  return NS::TransferPtr(context.device().newBinaryArchive(descriptor.get(), &ignored));
}

}  // namespace

Archive::Archive(const Context& context) : path_(archive_path(context)) {
  if (path_.empty()) return;
  std::error_code failed;
  if (fs::exists(path_, failed)) {
    archive_ = open(context, path_);
    loaded_ = bool(archive_);
    if (!archive_) fs::remove(path_, failed);  // damaged, or of another system
  }
  if (!archive_) archive_ = open(context, {});
}

NS::SharedPtr<MTL::ComputePipelineState> Archive::pipeline(const Context& context,
                                                           MTL::ComputePipelineDescriptor& descriptor,
                                                           NS::Error** error) {
  MTL::Device& device = context.device();
  if (archive_) {
    descriptor.setBinaryArchives(NS::Array::array(archive_.get()));
    NS::Error* missing = nullptr;
    if (loaded_) {
      auto stored = NS::TransferPtr(
          device.newComputePipelineState(&descriptor, MTL::PipelineOptionFailOnBinaryArchiveMiss, nullptr, &missing));
      if (stored) return stored;
    }
    // Compiled into the archive here, taken from it below.
    if (archive_->addComputePipelineFunctions(&descriptor, &missing)) changed_ = true;
  }
  return NS::TransferPtr(device.newComputePipelineState(&descriptor, MTL::PipelineOptionNone, nullptr, error));
}

void Archive::save() {
  if (!changed_) return;
  changed_ = false;
  loaded_ = true;
  std::error_code failed;
  fs::create_directories(path_.parent_path(), failed);
  // Another process may do the same: each writes a file of its own, and the last name given stays.
  const fs::path draft = path_.string() + "." + std::to_string(::getpid()) + ".part";
  NS::Error* ignored = nullptr;
  if (archive_->serializeToURL(NS::URL::fileURLWithPath(text(draft.c_str())), &ignored)) {
    fs::rename(draft, path_, failed);
    if (!failed) return;
  }
  fs::remove(draft, failed);
}

}  // namespace expertile::metal
