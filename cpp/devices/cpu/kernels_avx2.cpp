// AVX2 + FMA + F16C. Compiled with these flags: nothing here may be inline code that other units share.
#include "devices/cpu/kernels.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "devices/cpu/simd_avx2.h"

#include "devices/cpu/formats.h"

namespace expertile::cpu {

const Kernels* avx2_kernels() {
  static constexpr Kernels table = {
      .name = "avx2",
      .micro_weights = 2,
      .micro_rows = 3,
      .direct_rows = 4,
      .inner_step = 2560,
      .panel_weights = 16,
      .multiply = multiply<2, 3, true>,
      .multiply_fp32 = multiply<2, 3, false>,
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
const Kernels* avx2_kernels() { return nullptr; }
}  // namespace expertile::cpu
#endif
