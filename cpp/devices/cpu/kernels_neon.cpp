// 64-bit ARM: NEON is part of its baseline.
#include "devices/cpu/kernels.h"

#if defined(__aarch64__)
#include "devices/cpu/simd_neon.h"

#include "devices/cpu/formats.h"

namespace expertile::cpu {

const Kernels* neon_kernels() {
  static constexpr Kernels table = table_of<2, 3>(
      "neon", {.direct_rows = 4, .inner_step = 2560, .panel_weights = 16, .block_bytes = 4 << 20}, format<false>);
  return &table;
}

}  // namespace expertile::cpu
#else
namespace expertile::cpu {
const Kernels* neon_kernels() { return nullptr; }
}  // namespace expertile::cpu
#endif
