// half.h: Metal's 16-bit float on CUDA: ../host/half.h with the conversions by one instruction each, which round to
// nearest even and keep subnormals as that one does.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#define EXPERTILE_ISA cuda

namespace expertile::msl {
inline namespace EXPERTILE_ISA {

inline std::uint16_t float_to_half_bits(float value) {
  std::uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

inline float half_bits_to_float(std::uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

struct half {
  std::uint16_t bits;

  half() = default;
  template <class T>
    requires std::is_arithmetic_v<T>
  half(T value) : bits(float_to_half_bits(static_cast<float>(value))) {}  // NOLINT: implicit, as in Metal
  operator float() const { return half_bits_to_float(bits); }             // NOLINT

  half operator-() const { return from_bits(static_cast<std::uint16_t>(bits ^ 0x8000u)); }
  half operator+() const { return *this; }
  static constexpr half from_bits(std::uint16_t bits) {
    half result{};
    result.bits = bits;
    return result;
  }
  template <class T>
  half& operator+=(T other) {
    return *this = half(static_cast<float>(*this + other));
  }
  template <class T>
  half& operator-=(T other) {
    return *this = half(static_cast<float>(*this - other));
  }
  template <class T>
  half& operator*=(T other) {
    return *this = half(static_cast<float>(*this * other));
  }
  template <class T>
  half& operator/=(T other) {
    return *this = half(static_cast<float>(*this / other));
  }
};

// half with half or an integer gives half, with float gives float.
template <class T>
using half_result = std::conditional_t<std::is_floating_point_v<T>, float, half>;

#define EXPERTILE_HALF_OPERATOR(op, R, S)                                                            \
  inline R operator op(half a, half b) { return R(static_cast<float>(a) op static_cast<float>(b)); } \
  template <class T>                                                                                 \
    requires std::is_arithmetic_v<T>                                                                 \
  inline S operator op(half a, T b) {                                                                \
    return static_cast<float>(a) op static_cast<float>(half_result<T>(b));                           \
  }                                                                                                  \
  template <class T>                                                                                 \
    requires std::is_arithmetic_v<T>                                                                 \
  inline S operator op(T a, half b) {                                                                \
    return static_cast<float>(half_result<T>(a)) op static_cast<float>(b);                           \
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
