#include "devices/disk_cache.h"

#include <cstdlib>

namespace expertile {
namespace {

constexpr std::uint64_t kSeed = 0xcbf29ce484222325ull;

std::uint64_t fnv(const char* data, std::size_t bytes, std::uint64_t hash) {
  for (std::size_t i = 0; i < bytes; ++i) hash = (hash ^ static_cast<unsigned char>(data[i])) * 0x100000001b3ull;
  return hash;
}

}  // namespace

std::string cache_key(const std::vector<std::string>& texts) {
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

std::uint64_t checksum(const char* data, std::size_t bytes) { return fnv(data, bytes, kSeed); }

std::filesystem::path cache_directory(const std::string& kind) {
  if (const char* cache = std::getenv("XDG_CACHE_HOME"); cache && cache[0] == '/') {
    return std::filesystem::path(cache) / "expertile" / kind;
  }
  const char* home = std::getenv("HOME");
  if (!home || home[0] != '/') return {};
#if defined(__APPLE__)
  return std::filesystem::path(home) / "Library" / "Caches" / "expertile" / kind;
#else
  return std::filesystem::path(home) / ".cache" / "expertile" / kind;
#endif
}

}  // namespace expertile
