// Plain C++: the decoders are those of metal/include/quant.h, lowered to host C++ by metal/reflect.py.
#include "devices/cpu/kernels.h"
#include "devices/cpu/simd_portable.h"
#include "quant.lowered.h"

#include "devices/cpu/chains.h"
#include "devices/cpu/micro.h"
#include "devices/cpu/vector_math.h"

namespace {

using namespace expertile;

template <class Lowered>
struct Blocks {
  static constexpr std::size_t elements = Lowered::elements, bytes = Lowered::bytes;
  template <class Sink>
  static void decode(const std::uint8_t* p, Sink& sink) {
    for (unsigned i = 0; i < elements / 16; ++i) {
      float values[16];
      Lowered::decode8(p, 2 * i, values);
      Lowered::decode8(p, 2 * i + 1, values + 8);
      sink.put(static_cast<int>(i), Simd::round_half(Simd::load(values)));
    }
  }
};

struct F16 {
  static constexpr std::size_t elements = 1, bytes = 2;
  static Simd::Vector load(const std::uint8_t* p) { return Simd::load_half(p); }
};

struct BF16 {
  static constexpr std::size_t elements = 1, bytes = 2;
  static Simd::Vector load(const std::uint8_t* p) {
    float values[16];
    for (std::size_t i = 0; i < 16; ++i) {
      const std::uint32_t bits = static_cast<std::uint32_t>(p[2 * i] << 16) | static_cast<std::uint32_t>(p[2 * i + 1])
                                                                                  << 24;
      std::memcpy(&values[i], &bits, 4);
    }
    return Simd::round_half(Simd::load(values));
  }
};

struct F32 {
  static constexpr std::size_t elements = 1, bytes = 4;
  static Simd::Vector load(const std::uint8_t* p) {
    float values[16];
    std::memcpy(values, p, 64);
    return Simd::round_half(Simd::load(values));
  }
};

cpu::FormatKernels format(Type type) {
  switch (type) {
    case Type::F32:
      return format_kernels<F32>();
    case Type::F16:
      return format_kernels<F16>();
    case Type::BF16:
      return format_kernels<BF16>();
    case Type::Q4_0:
      return format_kernels<Blocks<msl::Q4_0>>();
    case Type::Q5_0:
      return format_kernels<Blocks<msl::Q5_0>>();
    case Type::Q5_1:
      return format_kernels<Blocks<msl::Q5_1>>();
    case Type::Q8_0:
      return format_kernels<Blocks<msl::Q8_0>>();
    case Type::Q2_0:
      return format_kernels<Blocks<msl::Q2_0>>();
    case Type::Q2_K:
      return format_kernels<Blocks<msl::Q2_K>>();
    case Type::Q3_K:
      return format_kernels<Blocks<msl::Q3_K>>();
    case Type::Q4_K:
      return format_kernels<Blocks<msl::Q4_K>>();
    case Type::Q5_K:
      return format_kernels<Blocks<msl::Q5_K>>();
    case Type::Q6_K:
      return format_kernels<Blocks<msl::Q6_K>>();
    case Type::IQ4_NL:
      return format_kernels<Blocks<msl::IQ4_NL>>();
    case Type::IQ4_XS:
      return format_kernels<Blocks<msl::IQ4_XS>>();
    case Type::IQ2_XXS:
      return format_kernels<Blocks<msl::IQ2_XXS>>();
    case Type::IQ2_XS:
      return format_kernels<Blocks<msl::IQ2_XS>>();
    case Type::IQ2_S:
      return format_kernels<Blocks<msl::IQ2_S>>();
    case Type::IQ3_XXS:
      return format_kernels<Blocks<msl::IQ3_XXS>>();
    case Type::IQ3_S:
      return format_kernels<Blocks<msl::IQ3_S>>();
  }
  return {nullptr, nullptr};
}

}  // namespace

namespace expertile::cpu {

const Kernels* portable_kernels() {
  static constexpr Kernels table = {
      .name = "portable",
      .micro_weights = 2,
      .micro_rows = 2,
      .direct_rows = 1,
      .inner_step = 1024,
      .panel_weights = 16,
      .multiply = multiply<2, 2, true>,
      .multiply_fp32 = multiply<2, 2, false>,
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
