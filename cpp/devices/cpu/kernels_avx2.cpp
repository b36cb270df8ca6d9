// AVX2 + FMA + F16C. Compiled with these flags: nothing here may be inline code that other units share.
#include "devices/cpu/kernels.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "devices/cpu/simd_avx2.h"

#include "devices/cpu/formats.h"

namespace expertile::cpu {

const Kernels* avx2_kernels() {
  static constexpr Kernels table = table_of<2, 3>(
      "avx2", {.direct_rows = 4, .inner_step = 2560, .panel_weights = 16, .block_bytes = 4 << 20}, format<false>);
  return &table;
}

}  // namespace expertile::cpu
#else
namespace expertile::cpu {
const Kernels* avx2_kernels() { return nullptr; }
}  // namespace expertile::cpu
#endif
