// disk_cache.h: where the devices keep what they compiled, and the keys by which they find it again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace expertile {

// 128 bits of the texts, as 32 hexadecimal digits.
std::string cache_key(const std::vector<std::string>& texts);

std::uint64_t checksum(const char* data, std::size_t bytes);

// The user's cache directory of one kind of device: by the XDG rules, else the system's own place. Empty where there is
// no home.
std::filesystem::path cache_directory(const std::string& kind);

}  // namespace expertile
