// formats.h: a unit's decoders by type, and all else that a table holds. Included behind simd_*.h.
#pragma once

#include "devices/cpu/chains.h"
#include "devices/cpu/decode_grid.h"
#include "devices/cpu/micro.h"
#include "devices/cpu/vector_math.h"

namespace {

// The decoders that need the grids.
template <class Format>
struct WithGrid {
  static constexpr std::size_t elements = Format::elements, bytes = Format::bytes;
  template <class Sink>
  static void decode(const std::uint8_t* p, Sink& sink) {
    Format::decode(p, expertile::cpu::grid_codes, sink);
  }
};

expertile::cpu::FormatKernels format(expertile::Type type) {
  using expertile::Type;
  switch (type) {
    case Type::F32:
      return format_kernels<F32>();
    case Type::F16:
      return format_kernels<F16>();
    case Type::BF16:
      return format_kernels<BF16>();
    case Type::Q4_0:
      return format_kernels<Q4_0>();
    case Type::Q5_0:
      return format_kernels<Q5_0>();
    case Type::Q5_1:
      return format_kernels<Q5_1>();
    case Type::Q8_0:
      return format_kernels<Q8_0>();
    case Type::Q2_0:
      return format_kernels<Q2_0>();
    case Type::Q2_K:
      return format_kernels<Q2_K>();
    case Type::Q3_K:
      return format_kernels<Q3_K>();
    case Type::Q4_K:
      return format_kernels<Q4_K>();
    case Type::Q5_K:
      return format_kernels<Q5_K>();
    case Type::Q6_K:
      return format_kernels<Q6_K>();
    case Type::IQ4_NL:
      return format_kernels<IQ4_NL>();
    case Type::IQ4_XS:
      return format_kernels<IQ4_XS>();
    case Type::IQ2_XXS:
      return format_kernels<WithGrid<IQ2_XXS>>();
    case Type::IQ2_XS:
      return format_kernels<WithGrid<IQ2_XS>>();
    case Type::IQ2_S:
      return format_kernels<WithGrid<IQ2_S>>();
    case Type::IQ3_XXS:
      return format_kernels<WithGrid<IQ3_XXS>>();
    case Type::IQ3_S:
      return format_kernels<WithGrid<IQ3_S>>();
  }
  return {nullptr, nullptr};
}

}  // namespace
