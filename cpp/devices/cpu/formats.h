// formats.h: a unit's decoders by type, and all else that a table holds. Included behind simd_*.h.
#pragma once

#include "devices/cpu/decode_grid.h"
#include "devices/cpu/table.h"

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

template <bool Packed>
expertile::cpu::FormatKernels format(expertile::Type type) {
  using expertile::Type;
  switch (type) {
    case Type::F32:
      return format_kernels<F32, Packed>();
    case Type::F16:
      return format_kernels<F16, Packed>();
    case Type::BF16:
      return format_kernels<BF16, Packed>();
    case Type::Q4_0:
      return format_kernels<Q4_0, Packed>();
    case Type::Q5_0:
      return format_kernels<Q5_0, Packed>();
    case Type::Q5_1:
      return format_kernels<Q5_1, Packed>();
    case Type::Q8_0:
      return format_kernels<Q8_0, Packed>();
    case Type::Q2_0:
      return format_kernels<Q2_0, Packed>();
    case Type::Q2_K:
      return format_kernels<Q2_K, Packed>();
    case Type::Q3_K:
      return format_kernels<Q3_K, Packed>();
    case Type::Q4_K:
      return format_kernels<Q4_K, Packed>();
    case Type::Q5_K:
      return format_kernels<Q5_K, Packed>();
    case Type::Q6_K:
      return format_kernels<Q6_K, Packed>();
    case Type::IQ4_NL:
      return format_kernels<IQ4_NL, Packed>();
    case Type::IQ4_XS:
      return format_kernels<IQ4_XS, Packed>();
    case Type::IQ2_XXS:
      return format_kernels<WithGrid<IQ2_XXS>, Packed>();
    case Type::IQ2_XS:
      return format_kernels<WithGrid<IQ2_XS>, Packed>();
    case Type::IQ2_S:
      return format_kernels<WithGrid<IQ2_S>, Packed>();
    case Type::IQ3_XXS:
      return format_kernels<WithGrid<IQ3_XXS>, Packed>();
    case Type::IQ3_S:
      return format_kernels<WithGrid<IQ3_S>, Packed>();
  }
  return {nullptr, nullptr, nullptr};
}

}  // namespace
