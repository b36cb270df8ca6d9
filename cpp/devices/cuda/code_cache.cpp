#include "devices/cuda/code_cache.h"

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

namespace expertile::cuda {
namespace {

namespace fs = std::filesystem;

// A stored file: this header, then the code.
struct FileHeader {
  char magic[8] = {'E', 'X', 'P', 'T', 'C', 'U', 'B', '1'};
  std::uint64_t bytes = 0;
  std::uint64_t checksum = 0;
};

std::uint64_t fnv(const char* data, std::size_t bytes, std::uint64_t hash) {
  for (std::size_t i = 0; i < bytes; ++i) hash = (hash ^ static_cast<unsigned char>(data[i])) * 0x100000001b3ull;
  return hash;
}

constexpr std::uint64_t kSeed = 0xcbf29ce484222325ull;

// The user's cache directory by the XDG rules; empty where there is no home.
fs::path directory() {
  if (const char* cache = std::getenv("XDG_CACHE_HOME"); cache && cache[0] == '/') {
    return fs::path(cache) / "expertile" / "cuda";
  }
  if (const char* home = std::getenv("HOME"); home && home[0] == '/') {
    return fs::path(home) / ".cache" / "expertile" / "cuda";
  }
  return {};
}

fs::path file_of(const std::string& key) {
  const fs::path where = directory();
  return where.empty() ? where : where / (key + ".bin");
}

}  // namespace

std::string code_key(const std::vector<std::string>& texts) {
  std::uint64_t low = kSeed, high = 0x9e3779b97f4a7c15ull;
  for (const std::string& text : texts) {
    const std::uint64_t bytes = text.size();
    for (std::uint64_t* hash : {&low, &high}) {
      *hash = fnv(reinterpret_cast<const char*>(&bytes), sizeof(bytes), *hash);
      *hash = fnv(text.data(), text.size(), *hash);
    }
    high ^= low >> 29;
  }
  static const char digits[] = "0123456789abcdef";
  std::string key;
  for (const std::uint64_t hash : {high, low}) {
    for (int shift = 60; shift >= 0; shift -= 4) key += digits[(hash >> shift) & 15];
  }
  return key;
}

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
        header.checksum == fnv(code.data(), code.size(), kSeed)) {
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
  header.checksum = fnv(code.data(), code.size(), kSeed);
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
