// metal_strict.h: declarations of metal_stdlib with real address spaces, for clang's eyes only (metal/strict.py).
//
// Nothing here is defined: the strict check compiles without generating code. Address spaces: 1 device, 2 constant,
// 3 threadgroup, and none for thread.
#pragma once

#define STRICT_DEVICE __attribute__((address_space(1)))
#define STRICT_CONSTANT __attribute__((address_space(2)))
#define STRICT_THREADGROUP __attribute__((address_space(3)))
#define METAL_FUNC inline
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define FLT_MAX __FLT_MAX__
#define FLT_MIN __FLT_MIN__
#define FLT_EPSILON __FLT_EPSILON__
#define HALF_MAX half(65504.0f)
#define HALF_MIN half(6.103515625e-05f)
#define UINT_MAX 0xffffffffu
#define INT_MAX 0x7fffffff
#define INT_MIN (-INT_MAX - 1)

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
typedef unsigned long size_t;
typedef long ptrdiff_t;
typedef _Float16 half;

template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));

#define STRICT_VECTORS(T) \
  typedef vec<T, 2> T##2; \
  typedef vec<T, 3> T##3; \
  typedef vec<T, 4> T##4;
STRICT_VECTORS(float)
STRICT_VECTORS(half)
STRICT_VECTORS(int)
STRICT_VECTORS(uint)
STRICT_VECTORS(short)
STRICT_VECTORS(ushort)
STRICT_VECTORS(char)
STRICT_VECTORS(uchar)
STRICT_VECTORS(ulong)
STRICT_VECTORS(bool)
#undef STRICT_VECTORS

template <class T>
struct strict_identity {
  typedef T type;
};
template <class T>
using strict_same = typename strict_identity<T>::type;

template <class To, class From>
constexpr To as_type(From from) {
  return __builtin_bit_cast(To, from);
}

// float4(a, b, ...): clang builds its vectors otherwise, so the lowered text calls this.
template <class Vector, class... Parts>
Vector strict_make(Parts...);

// Where arrays of a threadgroup lie.
STRICT_THREADGROUP void* strict_memory();

namespace metal {

using ::as_type;
using ::vec;

// f of numbers and of vectors, by type: a call between types is ambiguous, as in Metal.
#define STRICT_FOR(T, NAME, PARAMETERS) \
  T NAME PARAMETERS(T);                 \
  T##2 NAME PARAMETERS(T##2);           \
  T##3 NAME PARAMETERS(T##3);           \
  T##4 NAME PARAMETERS(T##4);
#define STRICT_ONE(T) (T)
#define STRICT_TWO(T) (T, T)
#define STRICT_THREE(T) (T, T, T)
// clang-format off: it never settles on lists of macros.
#define STRICT_REALS(NAME, PARAMETERS) STRICT_FOR(float, NAME, PARAMETERS) STRICT_FOR(half, NAME, PARAMETERS)
#define STRICT_INTEGERS(NAME, PARAMETERS) \
  STRICT_FOR(int, NAME, PARAMETERS) STRICT_FOR(uint, NAME, PARAMETERS) STRICT_FOR(short, NAME, PARAMETERS) \
  STRICT_FOR(ushort, NAME, PARAMETERS) STRICT_FOR(char, NAME, PARAMETERS) STRICT_FOR(uchar, NAME, PARAMETERS) \
  STRICT_FOR(ulong, NAME, PARAMETERS) long NAME PARAMETERS(long);
#define STRICT_NUMBERS(NAME, PARAMETERS) STRICT_REALS(NAME, PARAMETERS) STRICT_INTEGERS(NAME, PARAMETERS)

#define STRICT_MATH \
  STRICT_REALS(exp, STRICT_ONE) STRICT_REALS(exp2, STRICT_ONE) STRICT_REALS(log, STRICT_ONE) \
  STRICT_REALS(log2, STRICT_ONE) STRICT_REALS(sqrt, STRICT_ONE) STRICT_REALS(rsqrt, STRICT_ONE) \
  STRICT_REALS(floor, STRICT_ONE) STRICT_REALS(ceil, STRICT_ONE) STRICT_REALS(trunc, STRICT_ONE) \
  STRICT_REALS(round, STRICT_ONE) STRICT_REALS(rint, STRICT_ONE) STRICT_REALS(fabs, STRICT_ONE) \
  STRICT_REALS(sin, STRICT_ONE) STRICT_REALS(cos, STRICT_ONE) STRICT_REALS(tanh, STRICT_ONE) \
  STRICT_REALS(abs, STRICT_ONE) STRICT_REALS(fmin, STRICT_TWO) STRICT_REALS(fmax, STRICT_TWO) \
  STRICT_REALS(pow, STRICT_TWO) STRICT_REALS(copysign, STRICT_TWO) STRICT_REALS(min, STRICT_TWO) \
  STRICT_REALS(max, STRICT_TWO) STRICT_REALS(fma, STRICT_THREE) STRICT_REALS(clamp, STRICT_THREE) \
  float divide(float, float); \
  bool isnan(float); bool isinf(float); bool isfinite(float); \
  bool isnan(half); bool isinf(half); bool isfinite(half);
// clang-format on
STRICT_MATH
namespace precise {
STRICT_MATH
}
namespace fast {
STRICT_MATH
}
STRICT_INTEGERS(min, STRICT_TWO)
STRICT_INTEGERS(max, STRICT_TWO)
STRICT_INTEGERS(clamp, STRICT_THREE)
STRICT_INTEGERS(abs, STRICT_ONE)
STRICT_INTEGERS(popcount, STRICT_ONE)
STRICT_INTEGERS(clz, STRICT_ONE)
STRICT_INTEGERS(ctz, STRICT_ONE)
bool signbit(float);
float ldexp(float, int);
uint extract_bits(uint, uint, uint);
uint mulhi(uint, uint);
template <class T, class Mask>
T select(T, strict_same<T>, Mask);
float dot(float2, float2);
float dot(float3, float3);
float dot(float4, float4);

enum memory_order { memory_order_relaxed };
template <class T>
struct atomic {
  T value;
};

#define STRICT_ATOMIC(SPACE)                                                                                    \
  template <class T>                                                                                            \
  T atomic_load_explicit(const SPACE atomic<T>*, memory_order);                                                 \
  template <class T>                                                                                            \
  void atomic_store_explicit(SPACE atomic<T>*, strict_same<T>, memory_order);                                   \
  template <class T>                                                                                            \
  T atomic_exchange_explicit(SPACE atomic<T>*, strict_same<T>, memory_order);                                   \
  template <class T>                                                                                            \
  bool atomic_compare_exchange_weak_explicit(SPACE atomic<T>*, T*, strict_same<T>, memory_order, memory_order); \
  template <class T>                                                                                            \
  T atomic_fetch_add_explicit(SPACE atomic<T>*, strict_same<T>, memory_order);                                  \
  template <class T>                                                                                            \
  T atomic_fetch_sub_explicit(SPACE atomic<T>*, strict_same<T>, memory_order);                                  \
  template <class T>                                                                                            \
  T atomic_fetch_min_explicit(SPACE atomic<T>*, strict_same<T>, memory_order);                                  \
  template <class T>                                                                                            \
  T atomic_fetch_max_explicit(SPACE atomic<T>*, strict_same<T>, memory_order);                                  \
  template <class T>                                                                                            \
  T atomic_fetch_or_explicit(SPACE atomic<T>*, strict_same<T>, memory_order);                                   \
  template <class T>                                                                                            \
  T atomic_fetch_and_explicit(SPACE atomic<T>*, strict_same<T>, memory_order);                                  \
  template <class T>                                                                                            \
  T atomic_fetch_xor_explicit(SPACE atomic<T>*, strict_same<T>, memory_order);
STRICT_ATOMIC(STRICT_DEVICE)
STRICT_ATOMIC(STRICT_THREADGROUP)

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);

class simd_vote {
 public:
  typedef ulong vote_t;
  explicit simd_vote(vote_t);
  explicit operator vote_t() const;
  bool any() const;
  bool all() const;
};
STRICT_NUMBERS(simd_sum, STRICT_ONE)
STRICT_NUMBERS(simd_product, STRICT_ONE)
STRICT_NUMBERS(simd_max, STRICT_ONE)
STRICT_NUMBERS(simd_min, STRICT_ONE)
STRICT_INTEGERS(simd_or, STRICT_ONE)
STRICT_INTEGERS(simd_and, STRICT_ONE)
STRICT_INTEGERS(simd_xor, STRICT_ONE)
STRICT_NUMBERS(simd_prefix_exclusive_sum, STRICT_ONE)
STRICT_NUMBERS(simd_prefix_inclusive_sum, STRICT_ONE)
STRICT_NUMBERS(simd_broadcast_first, STRICT_ONE)
#define STRICT_MOVE(T) (T, ushort)
STRICT_NUMBERS(simd_shuffle, STRICT_MOVE)
STRICT_NUMBERS(simd_shuffle_xor, STRICT_MOVE)
STRICT_NUMBERS(simd_shuffle_up, STRICT_MOVE)
STRICT_NUMBERS(simd_shuffle_down, STRICT_MOVE)
STRICT_NUMBERS(simd_broadcast, STRICT_MOVE)
simd_vote simd_ballot(bool);
bool simd_any(bool);
bool simd_all(bool);
bool simd_is_first();

template <class T, int Columns, int Rows>
struct simdgroup_matrix {
  simdgroup_matrix();
  explicit simdgroup_matrix(T);
  vec<T, 2>& thread_elements();
  const vec<T, 2>& thread_elements() const;
};
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
template <class T, int Columns, int Rows>
simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(strict_same<T>);
#define STRICT_MATRIX(SPACE)                                                                                   \
  template <class T>                                                                                           \
  void simdgroup_load(simdgroup_matrix<T, 8, 8>&, const SPACE T*, ulong = 8, vec<ulong, 2> = 0, bool = false); \
  template <class T>                                                                                           \
  void simdgroup_store(const simdgroup_matrix<T, 8, 8>&, SPACE T*, ulong = 8, vec<ulong, 2> = 0, bool = false);
STRICT_MATRIX(STRICT_DEVICE)
STRICT_MATRIX(STRICT_THREADGROUP)
template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>&, const simdgroup_matrix<A, 8, 8>&,
                                   const simdgroup_matrix<B, 8, 8>&, const simdgroup_matrix<C, 8, 8>&);
template <class D, class A, class B>
void simdgroup_multiply(simdgroup_matrix<D, 8, 8>&, const simdgroup_matrix<A, 8, 8>&, const simdgroup_matrix<B, 8, 8>&);

}  // namespace metal

typedef metal::atomic<uint> atomic_uint;
typedef metal::atomic<int> atomic_int;
typedef metal::atomic<ulong> atomic_ulong;
typedef metal::atomic<float> atomic_float;
