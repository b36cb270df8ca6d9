// AVX-512 F, BW, DQ, VL. Compiled with these flags: nothing here may be inline code that other units share.
#include "devices/cpu/kernels.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "devices/cpu/simd_avx512.h"

#include "devices/cpu/formats.h"

namespace expertile::cpu {

const Kernels* avx512_kernels() {
  static constexpr Kernels table = {
      .name = "avx512",
      .micro_weights = 4,
      .micro_rows = 6,
      .direct_rows = 4,
      .inner_step = 1024,
      .panel_weights = 32,
      .multiply = multiply<4, 6, true>,
      .multiply_fp32 = multiply<4, 6, false>,
      .half_row = half_row,
      .round_row = round_row,
      .exp_row = exp_row,
      .sigmoid_row = sigmoid_row,
      .silu_half_row = silu_half_row,
      .swiglu_half_row = swiglu_half_row,
      .scale_row = scale_row,
      .add_scaled_row = add_scaled_row,
      .normalise_row = normalise_row,
      .add_product_row = add_product_row,
      .square_sum = square_sum,
      .format = format,
      .multiply_adds = multiply_adds,
  };
  return &table;
}

}  // namespace expertile::cpu
#else
namespace expertile::cpu {
const Kernels* avx512_kernels() { return nullptr; }
}  // namespace expertile::cpu
#endif
