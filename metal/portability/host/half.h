// half.h: Metal's 16-bit float on the host and on CUDA. Every operation rounds to nearest even; subnormals, infinities
// and NaN are those of IEEE 754. The conversions are one instruction each on CUDA and where the unit is compiled for
// F16C, else integers; the host's two give the same bits, of a NaN too.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#if defined(__F16C__)
#include <immintrin.h>
#endif

// The same inline functions are compiled for several instruction sets in one library; a namespace for each keeps the
// linker from choosing one set's copy for another's callers.
#if defined(__CUDACC_RTC__)
#define EXPERTILE_ISA cuda
#elif defined(__AVX512F__)
#define EXPERTILE_ISA isa_avx512
#elif defined(__AVX2__)
#define EXPERTILE_ISA isa_avx2
#elif defined(__F16C__)
#define EXPERTILE_ISA isa_f16c
#else
#define EXPERTILE_ISA isa_base
#endif

namespace expertile::msl {
inline namespace EXPERTILE_ISA {

constexpr std::uint16_t float_to_half_bits_soft(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  std::uint32_t result = 0;
  if (magnitude >= 0x47800000u) {  // 65536 and above, infinity, NaN (kept quiet, with the payload's upper bits)
    result = magnitude > 0x7f800000u ? 0x7e00u | ((magnitude >> 13) & 0x3ffu) : 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 puts the subnormal's bits, rounded, at the bottom
    result = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    result = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  return static_cast<std::uint16_t>(sign | result);
}

constexpr float half_bits_to_float_soft(std::uint16_t half) {
  const std::uint32_t sign = (half & 0x8000u) << 16;
  const std::uint32_t magnitude = (half & 0x7fffu) << 13;
  const std::uint32_t exponent = magnitude & 0x0f800000u;
  std::uint32_t result = magnitude + 0x38000000u;
  if (exponent == 0x0f800000u) {
    result += 0x38000000u;
    if ((magnitude & 0x007fffffu) != 0) result |= 0x00400000u;
  } else if (exponent == 0) {  // the hidden one that is not there is taken away again
    result = std::bit_cast<std::uint32_t>(std::bit_cast<float>(result + 0x00800000u) - 0x1p-14f);
  }
  return std::bit_cast<float>(sign | result);
}

constexpr std::uint16_t float_to_half_bits(float value) {
#if defined(__CUDACC_RTC__)
  if (!std::is_constant_evaluated()) {
    std::uint16_t bits = 0;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
  }
#elif defined(__F16C__)
  if (!std::is_constant_evaluated()) {
    return static_cast<std::uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT));
  }
#endif
  return float_to_half_bits_soft(value);
}

constexpr float half_bits_to_float(std::uint16_t half) {
#if defined(__CUDACC_RTC__)
  if (!std::is_constant_evaluated()) {
    float value = 0;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return value;
  }
#elif defined(__F16C__)
  if (!std::is_constant_evaluated()) return _cvtsh_ss(half);
#endif
  return half_bits_to_float_soft(half);
}

struct half {
  std::uint16_t bits;

  half() = default;
  template <class T>
    requires std::is_arithmetic_v<T>
  constexpr half(T value) : bits(float_to_half_bits(static_cast<float>(value))) {}  // NOLINT: implicit, as in Metal
  constexpr operator float() const { return half_bits_to_float(bits); }             // NOLINT

  constexpr half operator-() const { return from_bits(static_cast<std::uint16_t>(bits ^ 0x8000u)); }
  constexpr half operator+() const { return *this; }
  static constexpr half from_bits(std::uint16_t bits) {
    half result{};
    result.bits = bits;
    return result;
  }
  template <class T>
  constexpr half& operator+=(T other) {
    return *this = half(static_cast<float>(*this + other));
  }
  template <class T>
  constexpr half& operator-=(T other) {
    return *this = half(static_cast<float>(*this - other));
  }
  template <class T>
  constexpr half& operator*=(T other) {
    return *this = half(static_cast<float>(*this * other));
  }
  template <class T>
  constexpr half& operator/=(T other) {
    return *this = half(static_cast<float>(*this / other));
  }
};

// half with half or an integer gives half, with float gives float. A sum, product or quotient of two halves rounded to
// float and then to half is the correctly rounded one, since 24 >= 2 * 11 + 2.
template <class T>
using half_result = std::conditional_t<std::is_floating_point_v<T>, float, half>;

#define EXPERTILE_HALF_OPERATOR(op, R, S)                                                               \
  constexpr R operator op(half a, half b) { return R(static_cast<float>(a) op static_cast<float>(b)); } \
  template <class T>                                                                                    \
    requires std::is_arithmetic_v<T>                                                                    \
  constexpr S operator op(half a, T b) {                                                                \
    return static_cast<float>(a) op static_cast<float>(half_result<T>(b));                              \
  }                                                                                                     \
  template <class T>                                                                                    \
    requires std::is_arithmetic_v<T>                                                                    \
  constexpr S operator op(T a, half b) {                                                                \
    return static_cast<float>(half_result<T>(a)) op static_cast<float>(b);                              \
  }
EXPERTILE_HALF_OPERATOR(+, half, half_result<T>)
EXPERTILE_HALF_OPERATOR(-, half, half_result<T>)
EXPERTILE_HALF_OPERATOR(*, half, half_result<T>)
EXPERTILE_HALF_OPERATOR(/, half, half_result<T>)
EXPERTILE_HALF_OPERATOR(==, bool, bool)
EXPERTILE_HALF_OPERATOR(!=, bool, bool)
EXPERTILE_HALF_OPERATOR(<, bool, bool)
EXPERTILE_HALF_OPERATOR(<=, bool, bool)
EXPERTILE_HALF_OPERATOR(>, bool, bool)
EXPERTILE_HALF_OPERATOR(>=, bool, bool)
#undef EXPERTILE_HALF_OPERATOR

}  // namespace EXPERTILE_ISA
}  // namespace expertile::msl
