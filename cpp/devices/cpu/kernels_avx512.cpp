// AVX-512 F, BW, DQ, VL. Compiled with these flags: nothing here may be inline code that other units share.
#include "devices/cpu/kernels.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "devices/cpu/simd_avx512.h"

#include "devices/cpu/formats.h"

namespace expertile::cpu {

const Kernels* avx512_kernels() {
  static constexpr Kernels table = table_of<4, 6>(
      "avx512", {.direct_rows = 4, .inner_step = 640, .panel_weights = 8, .block_bytes = 1 << 20}, format<false>);
  return &table;
}

}  // namespace expertile::cpu
#else
namespace expertile::cpu {
const Kernels* avx512_kernels() { return nullptr; }
}  // namespace expertile::cpu
#endif
