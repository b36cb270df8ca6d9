// math.h: Metal's functions on numbers, for the host and CUDA. One overload a scalar type and none between them, so
// that a call that Metal would find ambiguous does not compile here either.
#pragma once

#include "types.h"

namespace expertile::msl {
inline namespace EXPERTILE_ISA {
namespace metal {

using msl::as_type;
using msl::vec;

// As fmin and fmax: of a number and a NaN, the number.
#define EXPERTILE_MIN_MAX(T)                                            \
  inline T min(T a, T b) { return (b < a || a != a) ? b : a; }          \
  inline T max(T a, T b) { return (a < b || a != a) ? b : a; }          \
  inline T clamp(T x, T low, T high) { return min(max(x, low), high); } \
  inline T select(T a, T b, bool c) { return c ? b : a; }
EXPERTILE_MIN_MAX(float)
EXPERTILE_MIN_MAX(half)
EXPERTILE_MIN_MAX(int)
EXPERTILE_MIN_MAX(uint)
EXPERTILE_MIN_MAX(short)
EXPERTILE_MIN_MAX(ushort)
EXPERTILE_MIN_MAX(signed char)
EXPERTILE_MIN_MAX(char)
EXPERTILE_MIN_MAX(uchar)
EXPERTILE_MIN_MAX(long)
EXPERTILE_MIN_MAX(ulong)
#undef EXPERTILE_MIN_MAX

inline float fmin(float a, float b) { return min(a, b); }
inline float fmax(float a, float b) { return max(a, b); }

#define EXPERTILE_REAL(name, function)               \
  inline float name(float x) { return function(x); } \
  inline half name(half x) { return half(function(static_cast<float>(x))); }
EXPERTILE_REAL(exp, ::expf)
EXPERTILE_REAL(exp2, ::exp2f)
EXPERTILE_REAL(log, ::logf)
EXPERTILE_REAL(log2, ::log2f)
EXPERTILE_REAL(sqrt, ::sqrtf)
EXPERTILE_REAL(floor, ::floorf)
EXPERTILE_REAL(ceil, ::ceilf)
EXPERTILE_REAL(trunc, ::truncf)
EXPERTILE_REAL(round, ::roundf)
EXPERTILE_REAL(rint, ::rintf)
EXPERTILE_REAL(fabs, ::fabsf)
EXPERTILE_REAL(sin, ::sinf)
EXPERTILE_REAL(cos, ::cosf)
EXPERTILE_REAL(tanh, ::tanhf)
EXPERTILE_REAL(rsqrt, 1.0f / ::sqrtf)
#undef EXPERTILE_REAL

inline float pow(float x, float y) { return ::powf(x, y); }
inline float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
inline half fma(half a, half b, half c) {  // exact in double, rounded once through an odd-rounded float
  const double exact = static_cast<double>(float(a)) * static_cast<double>(float(b)) + static_cast<double>(float(c));
  float rounded = static_cast<float>(exact);
  if (static_cast<double>(rounded) != exact && exact == exact) {
    uint bits = as_type<uint>(rounded);
    const bool away = ::fabs(static_cast<double>(rounded)) > ::fabs(exact);
    bits = (away ? bits - 1 : bits) | 1u;
    rounded = as_type<float>(bits);
  }
  return half(rounded);
}
inline float ldexp(float x, int e) { return ::ldexpf(x, e); }
inline float copysign(float x, float y) { return ::copysignf(x, y); }

inline float abs(float x) { return ::fabsf(x); }
inline half abs(half x) { return half::from_bits(x.bits & 0x7fffu); }
inline int abs(int x) { return x < 0 ? -x : x; }
inline short abs(short x) { return static_cast<short>(x < 0 ? -x : x); }
inline long abs(long x) { return x < 0 ? -x : x; }

inline bool isnan(float x) { return x != x; }
inline bool isinf(float x) { return (as_type<uint>(x) & 0x7fffffffu) == 0x7f800000u; }
inline bool isfinite(float x) { return (as_type<uint>(x) & 0x7f800000u) != 0x7f800000u; }
inline bool signbit(float x) { return (as_type<uint>(x) >> 31) != 0; }
inline bool isnan(half x) { return (x.bits & 0x7fffu) > 0x7c00u; }
inline bool isinf(half x) { return (x.bits & 0x7fffu) == 0x7c00u; }
inline bool isfinite(half x) { return (x.bits & 0x7c00u) != 0x7c00u; }

template <class T>
  requires std::is_integral_v<T>
inline T popcount(T x) {
  return static_cast<T>(std::popcount(static_cast<std::make_unsigned_t<T>>(x)));
}
template <class T>
  requires std::is_integral_v<T>
inline T clz(T x) {
  return static_cast<T>(std::countl_zero(static_cast<std::make_unsigned_t<T>>(x)));
}
template <class T>
  requires std::is_integral_v<T>
inline T ctz(T x) {
  return static_cast<T>(std::countr_zero(static_cast<std::make_unsigned_t<T>>(x)));
}
inline uint extract_bits(uint x, uint offset, uint bits) {
  return bits == 0 ? 0 : (x >> offset) & (bits >= 32 ? ~0u : (1u << bits) - 1u);
}
inline uint mulhi(uint a, uint b) { return static_cast<uint>((static_cast<ulong>(a) * b) >> 32); }

// The same functions by element.
#define EXPERTILE_VEC_FUNCTION(name)                                                          \
  template <class T, int N, class... Rest>                                                    \
  inline auto name(const vec<T, N>& a, const Rest&... rest) {                                 \
    vec<decltype(name(a.data[0], vec<T, N>(rest).data[0]...)), N> result;                     \
    for (int i = 0; i < N; ++i) result.data[i] = name(a.data[i], vec<T, N>(rest).data[i]...); \
    return result;                                                                            \
  }
EXPERTILE_VEC_FUNCTION(min)
EXPERTILE_VEC_FUNCTION(max)
EXPERTILE_VEC_FUNCTION(clamp)
EXPERTILE_VEC_FUNCTION(abs)
EXPERTILE_VEC_FUNCTION(exp)
EXPERTILE_VEC_FUNCTION(sqrt)
EXPERTILE_VEC_FUNCTION(rsqrt)
EXPERTILE_VEC_FUNCTION(floor)
EXPERTILE_VEC_FUNCTION(fma)
EXPERTILE_VEC_FUNCTION(isnan)
EXPERTILE_VEC_FUNCTION(isinf)
EXPERTILE_VEC_FUNCTION(isfinite)
EXPERTILE_VEC_FUNCTION(popcount)
#undef EXPERTILE_VEC_FUNCTION

template <class T, int N>
inline vec<T, N> select(const vec<T, N>& a, const vec<T, N>& b, const vec<bool, N>& c) {
  vec<T, N> result;
  for (int i = 0; i < N; ++i) result.data[i] = c.data[i] ? b.data[i] : a.data[i];
  return result;
}
template <class T, int N>
inline T dot(const vec<T, N>& a, const vec<T, N>& b) {
  T sum = a.data[0] * b.data[0];
  for (int i = 1; i < N; ++i) sum = sum + a.data[i] * b.data[i];
  return sum;
}
template <int N>
inline bool any(const vec<bool, N>& a) {
  bool result = false;
  for (int i = 0; i < N; ++i) result = result || a.data[i];
  return result;
}
template <int N>
inline bool all(const vec<bool, N>& a) {
  bool result = true;
  for (int i = 0; i < N; ++i) result = result && a.data[i];
  return result;
}

#define EXPERTILE_MATH_NAMES                                                                                          \
  using metal::abs, metal::ceil, metal::clamp, metal::cos, metal::exp, metal::exp2, metal::fabs, metal::floor,        \
      metal::fma, metal::fmax, metal::fmin, metal::log, metal::log2, metal::max, metal::min, metal::pow, metal::rint, \
      metal::round, metal::rsqrt, metal::sin, metal::sqrt, metal::tanh, metal::trunc, metal::isnan, metal::isinf,     \
      metal::isfinite;
namespace precise {
EXPERTILE_MATH_NAMES
inline float divide(float a, float b) { return a / b; }
}  // namespace precise
namespace fast {
EXPERTILE_MATH_NAMES
inline float divide(float a, float b) { return a / b; }
}  // namespace fast
#undef EXPERTILE_MATH_NAMES

}  // namespace metal
}  // namespace EXPERTILE_ISA
}  // namespace expertile::msl
