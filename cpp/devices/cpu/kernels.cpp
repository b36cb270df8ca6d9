// Which tables of inner loops this machine runs.
#include "devices/cpu/kernels.h"

#include <array>

#if (defined(__x86_64__) || defined(__i386__)) && defined(__GNUC__)
#define EXPERTILE_X86
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace expertile::cpu {
namespace {

#if defined(EXPERTILE_X86)
struct Leaf {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  Leaf(unsigned number, unsigned part) { __get_cpuid_count(number, part, &eax, &ebx, &ecx, &edx); }
};

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

// The tiles' registers are the system's to grant, once for the process. What else its unit is compiled for came with
// the tiles or before: arithmetic of halves, permutations of bytes, products of bits, bf16.
bool has_amx() {
#if defined(__x86_64__) && defined(__linux__)
  const Leaf features(7, 0);
  const auto edx = [&](int bit) { return (features.edx >> bit & 1) != 0; };
  const auto ecx = [&](int bit) { return (features.ecx >> bit & 1) != 0; };
  const bool tiles = edx(22) && edx(24);
  const bool around = edx(23) && ecx(1) && ecx(8) && (Leaf(7, 1).eax >> 5 & 1) != 0;
  if (!has_avx512() || !tiles || !around) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
#else
  return false;
#endif
}
#endif

bool machine_has(const std::string& name) {
#if defined(EXPERTILE_X86)
  __builtin_cpu_init();
  if (name == "avx2") return has_avx2();
  if (name == "avx512") return has_avx512();
  if (name == "amx" || name == "avx512+amx") return has_amx();
#endif
  return name == "portable" || name == "neon";  // NEON is part of its baseline: compiled means present
}

// Best first.
std::array<const Kernels*, 6> tables() {
  return {avx512_amx_kernels(), amx_kernels(), avx512_kernels(), avx2_kernels(), neon_kernels(), portable_kernels()};
}

}  // namespace

const Kernels* find_kernels(const std::string& name) {
  fill_grid_codes();
  for (const Kernels* table : tables()) {
    if (table != nullptr && (name.empty() || name == table->name) && machine_has(table->name)) return table;
  }
  return nullptr;
}

std::vector<std::string> kernel_names() {
  std::vector<std::string> names;
  for (const Kernels* table : tables()) {
    if (table != nullptr && machine_has(table->name)) names.emplace_back(table->name);
  }
  return names;
}

}  // namespace expertile::cpu
