// Which table of inner loops this machine runs.
#include "devices/cpu/kernels.h"

#include <array>

namespace expertile::cpu {
namespace {

bool machine_has(const std::string& name) {
#if (defined(__x86_64__) || defined(__i386__)) && defined(__GNUC__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (name == "avx2") return avx2;
  if (name == "avx512") {
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
#endif
  return name == "portable" || name == "neon";  // NEON is part of its baseline: compiled means present
}

}  // namespace

const Kernels* find_kernels(const std::string& name) {
  fill_grid_codes();
  const std::array<const Kernels*, 4> tables = {avx512_kernels(), avx2_kernels(), neon_kernels(), portable_kernels()};
  for (const Kernels* table : tables) {
    if (table != nullptr && (name.empty() || name == table->name) && machine_has(table->name)) return table;
  }
  return nullptr;
}

const Kernels& kernels() {
  static const Kernels* best = find_kernels("");
  return *best;
}

}  // namespace expertile::cpu
