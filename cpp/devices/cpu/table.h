// table.h: a unit's inner loops as a table. Included behind simd_*.h; the decoders come from the unit.
#pragma once

#include "devices/cpu/chains.h"
#include "devices/cpu/kernels.h"
#include "devices/cpu/micro.h"
#include "devices/cpu/vector_math.h"

namespace {

// What is chosen by measurement, beside the micro-kernel's largest step Weights x Rows.
struct Tuning {
  int direct_rows;
  std::size_t inner_step;
  std::size_t panel_weights;
  std::size_t block_bytes;
};

template <int Weights, int Rows>
constexpr expertile::cpu::Kernels table_of(const char* name, const Tuning& tuning,
                                           expertile::cpu::FormatKernels (*format)(expertile::Type)) {
  return {
      .name = name,
      .micro_weights = Weights,
      .micro_rows = Rows,
      .direct_rows = tuning.direct_rows,
      .inner_step = tuning.inner_step,
      .panel_weights = tuning.panel_weights,
      .block_bytes = tuning.block_bytes,
      .multiply = multiply<Weights, Rows, true>,
      .multiply_fp32 = multiply<Weights, Rows, false>,
      .tiles = nullptr,
      .exact_by_tiles = false,
      .half_row = half_row,
      .bf16_row = bf16_row,
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
}

}  // namespace
