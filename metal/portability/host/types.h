// types.h: Metal's scalar names, vectors of 2, 3 and 4, and as_type, for the host and CUDA.
//
// Swizzles: .xy .zw .xyz, which are contiguous and so can be members of a union; metal/strict.py refuses the others.
#pragma once

#include <cfloat>
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "half.h"

#define METAL_FUNC inline
#define HALF_MAX (::expertile::msl::half::from_bits(0x7bff))
#define HALF_MIN (::expertile::msl::half::from_bits(0x0400))

namespace expertile::msl {
inline namespace EXPERTILE_ISA {

using uint = std::uint32_t;
using ushort = std::uint16_t;
using uchar = std::uint8_t;
using ulong = std::uint64_t;
using std::int16_t;
using std::int32_t;
using std::int64_t;
using std::int8_t;
using std::ptrdiff_t;
using std::size_t;
using std::uint16_t;
using std::uint32_t;
using std::uint64_t;
using std::uint8_t;

template <class T>
concept scalar = std::is_arithmetic_v<T> || std::is_same_v<T, half>;

template <class T, int N>
struct vec;

template <class T>
struct alignas(2 * sizeof(T)) vec<T, 2> {
  union {
    struct {
      T x, y;
    };
    T data[2];
  };
  vec() = default;
  template <scalar S>
  constexpr vec(S value) : x(static_cast<T>(value)), y(static_cast<T>(value)) {}  // NOLINT: implicit, as in Metal
  template <scalar A, scalar B>
  constexpr vec(A a, B b) : x(static_cast<T>(a)), y(static_cast<T>(b)) {}
  template <class U>
  explicit constexpr vec(const vec<U, 2>& v) : x(static_cast<T>(v.x)), y(static_cast<T>(v.y)) {}
  T& operator[](size_t i) { return data[i]; }
  const T& operator[](size_t i) const { return data[i]; }
};

template <class T>
struct alignas(4 * sizeof(T)) vec<T, 3> {
  union {
    struct {
      T x, y, z;
    };
    vec<T, 2> xy;
    T data[3];
  };
  vec() = default;
  template <scalar S>
  constexpr vec(S value) : x(static_cast<T>(value)), y(static_cast<T>(value)), z(static_cast<T>(value)) {}  // NOLINT
  template <scalar A, scalar B, scalar C>
  constexpr vec(A a, B b, C c) : x(static_cast<T>(a)), y(static_cast<T>(b)), z(static_cast<T>(c)) {}
  template <scalar C>
  constexpr vec(const vec<T, 2>& a, C c) : x(a.x), y(a.y), z(static_cast<T>(c)) {}
  template <class U>
  explicit constexpr vec(const vec<U, 3>& v) : x(static_cast<T>(v.x)), y(static_cast<T>(v.y)), z(static_cast<T>(v.z)) {}
  T& operator[](size_t i) { return data[i]; }
  const T& operator[](size_t i) const { return data[i]; }
};

template <class T>
struct alignas(4 * sizeof(T)) vec<T, 4> {
  union {
    struct {
      T x, y, z, w;
    };
    struct {
      vec<T, 2> xy, zw;
    };
    vec<T, 3> xyz;
    T data[4];
  };
  vec() = default;
  template <scalar S>
  constexpr vec(S value)  // NOLINT: implicit, as in Metal
      : x(static_cast<T>(value)), y(static_cast<T>(value)), z(static_cast<T>(value)), w(static_cast<T>(value)) {}
  template <scalar A, scalar B, scalar C, scalar D>
  constexpr vec(A a, B b, C c, D d)
      : x(static_cast<T>(a)), y(static_cast<T>(b)), z(static_cast<T>(c)), w(static_cast<T>(d)) {}
  constexpr vec(const vec<T, 2>& a, const vec<T, 2>& b) : x(a.x), y(a.y), z(b.x), w(b.y) {}
  template <scalar D>
  constexpr vec(const vec<T, 3>& a, D d) : x(a.x), y(a.y), z(a.z), w(static_cast<T>(d)) {}
  template <class U>
  explicit constexpr vec(const vec<U, 4>& v)
      : x(static_cast<T>(v.x)), y(static_cast<T>(v.y)), z(static_cast<T>(v.z)), w(static_cast<T>(v.w)) {}
  T& operator[](size_t i) { return data[i]; }
  const T& operator[](size_t i) const { return data[i]; }
};

template <class V>
inline constexpr bool is_vec = false;
template <class T, int N>
inline constexpr bool is_vec<vec<T, N>> = true;

// Elementwise f; the scalar side of a mixed operation is converted to the vector's element first, as in Metal.
#define EXPERTILE_VEC_BINARY(op)                                                         \
  template <class T, int N>                                                              \
  inline vec<T, N> operator op(const vec<T, N>& a, const vec<T, N>& b) {                 \
    vec<T, N> result;                                                                    \
    for (int i = 0; i < N; ++i) result.data[i] = static_cast<T>(a.data[i] op b.data[i]); \
    return result;                                                                       \
  }                                                                                      \
  template <class T, int N, scalar S>                                                    \
  inline vec<T, N> operator op(const vec<T, N>& a, S b) {                                \
    return a op vec<T, N>(b);                                                            \
  }                                                                                      \
  template <class T, int N, scalar S>                                                    \
  inline vec<T, N> operator op(S a, const vec<T, N>& b) {                                \
    return vec<T, N>(a) op b;                                                            \
  }                                                                                      \
  template <class T, int N, class B>                                                     \
  inline vec<T, N>& operator op##=(vec<T, N>& a, const B & b) {                          \
    return a = a op b;                                                                   \
  }
EXPERTILE_VEC_BINARY(+)
EXPERTILE_VEC_BINARY(-)
EXPERTILE_VEC_BINARY(*)
EXPERTILE_VEC_BINARY(/)
EXPERTILE_VEC_BINARY(%)
EXPERTILE_VEC_BINARY(&)
EXPERTILE_VEC_BINARY(|)
EXPERTILE_VEC_BINARY(^)
EXPERTILE_VEC_BINARY(<<)
EXPERTILE_VEC_BINARY(>>)
#undef EXPERTILE_VEC_BINARY

#define EXPERTILE_VEC_COMPARE(op)                                           \
  template <class T, int N>                                                 \
  inline vec<bool, N> operator op(const vec<T, N>& a, const vec<T, N>& b) { \
    vec<bool, N> result;                                                    \
    for (int i = 0; i < N; ++i) result.data[i] = a.data[i] op b.data[i];    \
    return result;                                                          \
  }                                                                         \
  template <class T, int N, scalar S>                                       \
  inline vec<bool, N> operator op(const vec<T, N>& a, S b) {                \
    return a op vec<T, N>(b);                                               \
  }                                                                         \
  template <class T, int N, scalar S>                                       \
  inline vec<bool, N> operator op(S a, const vec<T, N>& b) {                \
    return vec<T, N>(a) op b;                                               \
  }
EXPERTILE_VEC_COMPARE(==)
EXPERTILE_VEC_COMPARE(!=)
EXPERTILE_VEC_COMPARE(<)
EXPERTILE_VEC_COMPARE(<=)
EXPERTILE_VEC_COMPARE(>)
EXPERTILE_VEC_COMPARE(>=)
EXPERTILE_VEC_COMPARE(&&)
EXPERTILE_VEC_COMPARE(||)
#undef EXPERTILE_VEC_COMPARE

#define EXPERTILE_VEC_UNARY(op, R)                                             \
  template <class T, int N>                                                    \
  inline vec<R, N> operator op(const vec<T, N>& a) {                           \
    vec<R, N> result;                                                          \
    for (int i = 0; i < N; ++i) result.data[i] = static_cast<R>(op a.data[i]); \
    return result;                                                             \
  }
EXPERTILE_VEC_UNARY(-, T)
EXPERTILE_VEC_UNARY(~, T)
EXPERTILE_VEC_UNARY(!, bool)
#undef EXPERTILE_VEC_UNARY

#define EXPERTILE_VEC_NAMES(T) \
  using T##2 = vec<T, 2>;      \
  using T##3 = vec<T, 3>;      \
  using T##4 = vec<T, 4>;
EXPERTILE_VEC_NAMES(float)
EXPERTILE_VEC_NAMES(half)
EXPERTILE_VEC_NAMES(int)
EXPERTILE_VEC_NAMES(uint)
EXPERTILE_VEC_NAMES(short)
EXPERTILE_VEC_NAMES(ushort)
EXPERTILE_VEC_NAMES(char)
EXPERTILE_VEC_NAMES(uchar)
EXPERTILE_VEC_NAMES(ulong)
EXPERTILE_VEC_NAMES(bool)
#undef EXPERTILE_VEC_NAMES
using packed_float3 = float[3];

static_assert(sizeof(half) == 2 && sizeof(half4) == 8 && sizeof(float3) == 16 && sizeof(uint4) == 16);

template <class To, class From>
inline To as_type(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of one size");
  return __builtin_bit_cast(To, from);
}

}  // namespace EXPERTILE_ISA
}  // namespace expertile::msl
