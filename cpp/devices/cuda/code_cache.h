// code_cache.h: compiled kernels on disk, so that a process compiles only what no process before it has compiled.
#pragma once

#include <optional>
#include <string>

namespace expertile::cuda {

// The code under `key`, or nothing: never stored, damaged, or no directory. A damaged file is removed.
std::optional<std::string> cached_code(const std::string& key);

// Stores by writing another file and renaming it. A directory that cannot be written is no error: the cache stays
// empty.
void cache_code(const std::string& key, const std::string& code);

void forget_code(const std::string& key);

}  // namespace expertile::cuda
