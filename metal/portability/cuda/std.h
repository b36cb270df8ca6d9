// std.h: the few names of the C++ library that the shims use, for NVRTC, which has no library. The CUDA device hands it
// over under the names of all the standard headers that the shims in ../host include.
#pragma once

#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#define INT_MAX 2147483647
#define UINT_MAX 4294967295u
#define INFINITY (__builtin_bit_cast(float, 0x7f800000u))
#define NAN (__builtin_bit_cast(float, 0x7fc00000u))

namespace std {

using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long;
using ::size_t;
using ptrdiff_t = long;
static_assert(sizeof(long) == 8);

template <class A, class B>
inline constexpr bool is_same_v = false;
template <class A>
inline constexpr bool is_same_v<A, A> = true;

template <bool yes, class A, class B>
struct conditional {
  using type = A;
};
template <class A, class B>
struct conditional<false, A, B> {
  using type = B;
};
template <bool yes, class A, class B>
using conditional_t = typename conditional<yes, A, B>::type;

template <class A>
struct type_identity {
  using type = A;
};
template <class A>
using type_identity_t = typename type_identity<A>::type;

template <class A>
struct remove_cv {
  using type = A;
};
template <class A>
struct remove_cv<const A> {
  using type = A;
};
template <class A>
using remove_cv_t = typename remove_cv<A>::type;

template <class A, class... Some>
inline constexpr bool is_any_of_v = (is_same_v<A, Some> || ...);
template <class A>
inline constexpr bool is_floating_point_v = is_any_of_v<remove_cv_t<A>, float, double>;
template <class A>
inline constexpr bool is_integral_v =
    is_any_of_v<remove_cv_t<A>, bool, char, signed char, unsigned char, short, unsigned short, int, unsigned int, long,
                unsigned long, long long, unsigned long long>;
template <class A>
inline constexpr bool is_arithmetic_v = is_floating_point_v<A> || is_integral_v<A>;

template <class A>
struct make_unsigned {
  using type =
      conditional_t<sizeof(A) == 1, uint8_t,
                    conditional_t<sizeof(A) == 2, uint16_t, conditional_t<sizeof(A) == 4, uint32_t, uint64_t>>>;
};
template <class A>
using make_unsigned_t = typename make_unsigned<A>::type;

constexpr bool is_constant_evaluated() { return __builtin_is_constant_evaluated(); }

template <class To, class From>
constexpr To bit_cast(const From& from) {
  return __builtin_bit_cast(To, from);
}

template <class A>
inline int popcount(A value) {
  if constexpr (sizeof(A) <= 4) {
    return __popc(static_cast<uint32_t>(value));
  } else {
    return __popcll(value);
  }
}
template <class A>
inline int countl_zero(A value) {
  if constexpr (sizeof(A) <= 4) {
    return __clz(static_cast<int>(value)) - (32 - 8 * static_cast<int>(sizeof(A)));
  } else {
    return __clzll(static_cast<long long>(value));
  }
}
template <class A>
inline int countr_zero(A value) {
  if (value == 0) return 8 * static_cast<int>(sizeof(A));
  if constexpr (sizeof(A) <= 4) {
    return __ffs(static_cast<int>(value)) - 1;
  } else {
    return __ffsll(static_cast<long long>(value)) - 1;
  }
}

}  // namespace std
