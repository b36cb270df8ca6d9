#include "devices/cuda/code_cache.h"

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "devices/disk_cache.h"

namespace expertile::cuda {
namespace {

namespace fs = std::filesystem;

// A stored file: this header, then the code.
struct FileHeader {
  char magic[8] = {'E', 'X', 'P', 'T', 'C', 'U', 'B', '1'};
  std::uint64_t bytes = 0;
  std::uint64_t checksum = 0;
};

fs::path file_of(const std::string& key) {
  const fs::path where = cache_directory("cuda");
  return where.empty() ? where : where / (key + ".bin");
}

}  // namespace

std::optional<std::string> cached_code(const std::string& key) {
  const fs::path path = file_of(key);
  if (path.empty()) return std::nullopt;
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  const std::string all{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  FileHeader header;
  const FileHeader expected;
  if (all.size() > sizeof(header)) {
    std::memcpy(&header, all.data(), sizeof(header));
    std::string code = all.substr(sizeof(header));
    if (std::memcmp(header.magic, expected.magic, sizeof(header.magic)) == 0 && header.bytes == code.size() &&
        header.checksum == checksum(code.data(), code.size())) {
      return code;
    }
  }
  forget_code(key);
  return std::nullopt;
}

void cache_code(const std::string& key, const std::string& code) {
  const fs::path path = file_of(key);
  if (path.empty()) return;
  static std::atomic<unsigned> counter{0};
  std::error_code failed;
  fs::create_directories(path.parent_path(), failed);
  const fs::path draft =
      path.parent_path() / (key + "." + std::to_string(::getpid()) + "." + std::to_string(counter++) + ".part");
  FileHeader header;
  header.bytes = code.size();
  header.checksum = checksum(code.data(), code.size());
  {
    std::ofstream file(draft, std::ios::binary | std::ios::trunc);
    file.write(reinterpret_cast<const char*>(&header), sizeof(header));
    file.write(code.data(), static_cast<std::streamsize>(code.size()));
    file.close();
    if (!file) {
      fs::remove(draft, failed);
      return;
    }
  }
  fs::rename(draft, path, failed);
  if (failed) fs::remove(draft, failed);
}

void forget_code(const std::string& key) {
  const fs::path path = file_of(key);
  std::error_code ignored;
  if (!path.empty()) fs::remove(path, ignored);
}

}  // namespace expertile::cuda
