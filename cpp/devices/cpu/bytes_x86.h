// bytes_x86.h: what the tables of AVX2 and of AVX-512 share: operations on 16 bytes and on 32 (`Wide`).
//
// Only for units compiled with AVX2 and F16C; Simd of simd_avx2.h and simd_avx512.h inherits it.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

struct BytesX86 {
  using Bytes = __m128i;
  using Wide = __m256i;

  static float half_at(const std::uint8_t* p) {
    std::uint16_t bits;
    std::memcpy(&bits, p, 2);
    return _cvtsh_ss(bits);
  }

  static Bytes load_bytes(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static Bytes load_two(const void* p, const void* q) {
    const __m128i low = _mm_loadl_epi64(static_cast<const __m128i*>(p));
    return _mm_castps_si128(_mm_loadh_pi(_mm_castsi128_ps(low), static_cast<const __m64*>(q)));
  }
  static Bytes load_four(const void* p, const void* q, const void* r, const void* s) {
    std::int32_t word[4];
    std::memcpy(&word[0], p, 4);
    std::memcpy(&word[1], q, 4);
    std::memcpy(&word[2], r, 4);
    std::memcpy(&word[3], s, 4);
    return _mm_set_epi32(word[3], word[2], word[1], word[0]);
  }
  static Bytes every(std::uint8_t x) { return _mm_set1_epi8(static_cast<char>(x)); }
  static Bytes bit_and(Bytes a, Bytes b) { return _mm_and_si128(a, b); }
  static Bytes bit_or(Bytes a, Bytes b) { return _mm_or_si128(a, b); }
  static Bytes minus(Bytes a, Bytes b) { return _mm_sub_epi8(a, b); }
  static Bytes shift_right(Bytes a, int n) {
    return _mm_and_si128(_mm_srli_epi16(a, n), every(static_cast<std::uint8_t>(0xff >> n)));
  }
  static Bytes zip_low(Bytes a, Bytes b) { return _mm_unpacklo_epi8(a, b); }
  static Bytes zip_high(Bytes a, Bytes b) { return _mm_unpackhi_epi8(a, b); }
  static Bytes high_half(Bytes a) { return _mm_unpackhi_epi64(a, a); }
  // Byte i is `value` where bit i of `bits` is set, else 0.
  static Bytes spread_bits(std::uint32_t bits, std::uint8_t value) {
    const __m128i where = _mm_set_epi8(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m128i bit = _mm_set1_epi64x(static_cast<long long>(0x8040201008040201ull));
    const __m128i copies = _mm_shuffle_epi8(_mm_cvtsi32_si128(static_cast<int>(bits)), where);
    return _mm_and_si128(_mm_cmpeq_epi8(_mm_and_si128(copies, bit), bit), every(value));
  }

  static Wide load_wide(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static void store_wide(void* p, Wide a) { _mm256_store_si256(static_cast<__m256i*>(p), a); }
  // `low` 16 times, then `high`.
  static Wide halves(std::uint8_t low, std::uint8_t high) { return _mm256_set_m128i(every(high), every(low)); }
  static Wide either(Wide a, Wide b) { return _mm256_or_si256(a, b); }
  static Wide less(Wide a, std::uint8_t b) { return _mm256_sub_epi8(a, _mm256_set1_epi8(static_cast<char>(b))); }
  // Bits from .. from+count-1 of every byte, as its bits to .. to+count-1. What crosses a byte's border is masked.
  static Wide take_bits(Wide a, int from, int count, int to) {
    const Wide moved = from < to ? _mm256_slli_epi16(a, to - from) : _mm256_srli_epi16(a, from - to);
    return _mm256_and_si256(moved, _mm256_set1_epi8(static_cast<char>(((1 << count) - 1) << to)));
  }

  // d times 8 numbers of 6 bits less 32; in ascending places of 4 bits their lower parts, of 2 bits their upper.
  static void six_bit_scales(float d, std::uint32_t lower, std::uint32_t upper, float* scale) {
    const __m256i lane = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
    const auto part = [](std::uint32_t bits, __m256i place, int mask) {
      return _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(static_cast<int>(bits)), place),
                              _mm256_set1_epi32(mask));
    };
    const __m256i low = part(lower, _mm256_slli_epi32(lane, 2), 15);
    const __m256i high = _mm256_slli_epi32(part(upper, _mm256_slli_epi32(lane, 1), 3), 4);
    const __m256i number = _mm256_sub_epi32(either(low, high), _mm256_set1_epi32(32));
    _mm256_store_ps(scale, _mm256_mul_ps(_mm256_set1_ps(d), _mm256_cvtepi32_ps(number)));
  }

  // Memory from here on: else the compiler takes a stored register's elements one by one, two instructions each.
  template <class T, std::size_t N>
  static void in_memory(T (&array)[N]) {
    asm("" : "+m"(array));
  }
};

}  // namespace
