// Plain C++: the decoders are those of metal/include/quant.h, lowered to host C++ by metal/reflect.py.
#include "devices/cpu/kernels.h"
#include "devices/cpu/simd_portable.h"
#include "quant.lowered.h"

#include "devices/cpu/table.h"

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

template <bool Packed>
cpu::FormatKernels format(Type type) {
  switch (type) {
    case Type::F32:
      return format_kernels<F32, Packed>();
    case Type::F16:
      return format_kernels<F16, Packed>();
    case Type::BF16:
      return format_kernels<BF16, Packed>();
    case Type::Q4_0:
      return format_kernels<Blocks<msl::Q4_0>, Packed>();
    case Type::Q5_0:
      return format_kernels<Blocks<msl::Q5_0>, Packed>();
    case Type::Q5_1:
      return format_kernels<Blocks<msl::Q5_1>, Packed>();
    case Type::Q8_0:
      return format_kernels<Blocks<msl::Q8_0>, Packed>();
    case Type::Q2_0:
      return format_kernels<Blocks<msl::Q2_0>, Packed>();
    case Type::Q2_K:
      return format_kernels<Blocks<msl::Q2_K>, Packed>();
    case Type::Q3_K:
      return format_kernels<Blocks<msl::Q3_K>, Packed>();
    case Type::Q4_K:
      return format_kernels<Blocks<msl::Q4_K>, Packed>();
    case Type::Q5_K:
      return format_kernels<Blocks<msl::Q5_K>, Packed>();
    case Type::Q6_K:
      return format_kernels<Blocks<msl::Q6_K>, Packed>();
    case Type::IQ4_NL:
      return format_kernels<Blocks<msl::IQ4_NL>, Packed>();
    case Type::IQ4_XS:
      return format_kernels<Blocks<msl::IQ4_XS>, Packed>();
    case Type::IQ2_XXS:
      return format_kernels<Blocks<msl::IQ2_XXS>, Packed>();
    case Type::IQ2_XS:
      return format_kernels<Blocks<msl::IQ2_XS>, Packed>();
    case Type::IQ2_S:
      return format_kernels<Blocks<msl::IQ2_S>, Packed>();
    case Type::IQ3_XXS:
      return format_kernels<Blocks<msl::IQ3_XXS>, Packed>();
    case Type::IQ3_S:
      return format_kernels<Blocks<msl::IQ3_S>, Packed>();
  }
  return {nullptr, nullptr, nullptr};
}

}  // namespace

namespace expertile::cpu {

const Kernels* portable_kernels() {
  static constexpr Kernels table = table_of<2, 2>(
      "portable", {.direct_rows = 1, .inner_step = 1024, .panel_weights = 16, .block_bytes = 4 << 20}, format<false>);
  return &table;
}

}  // namespace expertile::cpu
