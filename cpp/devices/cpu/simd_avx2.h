// simd_avx2.h: 16 fp32 lanes and 16 bytes on AVX2 + FMA + F16C. Only for units compiled with these flags.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "devices/cpu/bytes_x86.h"

namespace {

struct Simd : BytesX86 {
  static constexpr int kParts = 2;
  static constexpr int kWidth = 8;
  static constexpr int kDirectWeights = 1;
  static constexpr bool kSignMasks = false;
  static constexpr bool kHalfProducts = false;
  using Part = __m256;
  struct Vector {
    __m256 part[2];
  };
  // 16 halves, split into their low and their high bytes: two byte shuffles look 16 of them up.
  struct Table {
    __m128i low, high;
  };

  static Part load_part(const float* p) { return _mm256_loadu_ps(p); }
  static void store_part(float* p, Part v) { _mm256_storeu_ps(p, v); }
  // A register from here on: else the compiler loads anew for every use.
  static void keep(Part& v) { asm("" : "+x"(v)); }
  static Part zero_part() { return _mm256_setzero_ps(); }
  static Part fused(Part a, Part b, Part sum) { return _mm256_fmadd_ps(a, b, sum); }
  static Part separate(Part a, Part b, Part sum) { return _mm256_add_ps(sum, _mm256_mul_ps(a, b)); }

  static Vector load(const float* p) { return {{_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}}; }
  static void store(float* p, Vector v) {
    _mm256_storeu_ps(p, v.part[0]);
    _mm256_storeu_ps(p + 8, v.part[1]);
  }
  static Vector all(float x) { return {{_mm256_set1_ps(x), _mm256_set1_ps(x)}}; }
  // 8 lanes of p[0], 8 of p[1]; then 4 lanes of each of p[0..3].
  static Vector pairs(const float* p) { return {{_mm256_set1_ps(p[0]), _mm256_set1_ps(p[1])}}; }
  static Vector quads(const float* p) {
    return {
        {_mm256_set_m128(_mm_set1_ps(p[1]), _mm_set1_ps(p[0])), _mm256_set_m128(_mm_set1_ps(p[3]), _mm_set1_ps(p[2]))}};
  }
  static Vector add(Vector a, Vector b) {
    return {{_mm256_add_ps(a.part[0], b.part[0]), _mm256_add_ps(a.part[1], b.part[1])}};
  }
  static Vector subtract(Vector a, Vector b) {
    return {{_mm256_sub_ps(a.part[0], b.part[0]), _mm256_sub_ps(a.part[1], b.part[1])}};
  }
  static Vector multiply(Vector a, Vector b) {
    return {{_mm256_mul_ps(a.part[0], b.part[0]), _mm256_mul_ps(a.part[1], b.part[1])}};
  }
  static Vector divide(Vector a, Vector b) {
    return {{_mm256_div_ps(a.part[0], b.part[0]), _mm256_div_ps(a.part[1], b.part[1])}};
  }
  // NaN stays NaN.
  static Vector clamp(Vector v, float low, float high) {
    for (__m256& part : v.part) {
      part = _mm256_max_ps(_mm256_set1_ps(low), _mm256_min_ps(_mm256_set1_ps(high), part));
    }
    return v;
  }
  // 2^(v / 2) rounded down and what is left of 2^v, for whole v of -252..252.
  static void powers_of_two(Vector v, Vector* half, Vector* rest) {
    for (int i = 0; i < 2; ++i) {
      const __m256i whole = _mm256_cvtps_epi32(v.part[i]);
      const __m256i first = _mm256_srai_epi32(whole, 1);
      const __m256i second = _mm256_sub_epi32(whole, first);
      const __m256i bias = _mm256_set1_epi32(127);
      half->part[i] = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(first, bias), 23));
      rest->part[i] = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(second, bias), 23));
    }
  }
  static __m128i to_half(__m256 v) { return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }
  static Vector round_half(Vector v) {
    return {{_mm256_cvtph_ps(to_half(v.part[0])), _mm256_cvtph_ps(to_half(v.part[1]))}};
  }
  static Vector load_half(const std::uint8_t* p) {
    return {{_mm256_cvtph_ps(load_bytes(p)), _mm256_cvtph_ps(load_bytes(p + 16))}};
  }
  static Vector load_bf16(const std::uint8_t* p) {
    const __m256i low = _mm256_slli_epi32(_mm256_cvtepu16_epi32(load_bytes(p)), 16);
    const __m256i high = _mm256_slli_epi32(_mm256_cvtepu16_epi32(load_bytes(p + 16)), 16);
    return {{_mm256_castsi256_ps(low), _mm256_castsi256_ps(high)}};
  }
  static Vector from_signed(Bytes b) {
    return {{_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(b)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(high_half(b)))}};
  }
  static void store_half(std::uint16_t* p, Vector v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_half(v.part[0]));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), to_half(v.part[1]));
  }
  // Halves saturate at +-65504, NaN passes; adds to `count` how many did.
  static Vector saturate(Vector v, std::uint64_t& count) {
    const __m256 most = _mm256_set1_ps(65504.0f);
    const __m256 sign = _mm256_set1_ps(-0.0f);
    for (__m256& part : v.part) {
      const __m256 over = _mm256_cmp_ps(_mm256_andnot_ps(sign, part), most, _CMP_GT_OQ);
      count += static_cast<std::uint32_t>(__builtin_popcount(static_cast<unsigned>(_mm256_movemask_ps(over))));
      part = _mm256_blendv_ps(part, _mm256_or_ps(_mm256_and_ps(sign, part), most), over);
    }
    return v;
  }

  // To bf16 and back, to nearest even. NaN passes.
  static Vector round_bf16(Vector v) {
    for (__m256& part : v.part) {
      const __m256i bits = _mm256_castps_si256(part);
      const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
      const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
      const __m256 rounded = _mm256_and_ps(_mm256_castsi256_ps(up), upper_bits());
      part = _mm256_blendv_ps(rounded, _mm256_and_ps(part, upper_bits()), _mm256_cmp_ps(part, part, _CMP_UNORD_Q));
    }
    return v;
  }
  static __m256 upper_bits() { return _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(0xffff0000))); }
  // The upper 8 significant bits of halves.
  static Vector upper(Vector v) {
    for (__m256& part : v.part) part = _mm256_and_ps(part, upper_bits());
    return v;
  }
  // 32 values as bf16, to nearest even: 16 words, values of `a` in their lower halves, of `b` in their upper ones.
  static void store_rounded(std::uint32_t* to, Vector a, Vector b) {
    a = round_bf16(a);
    b = round_bf16(b);
    for (int i = 0; i < 2; ++i) {
      const __m256i lower = _mm256_srli_epi32(_mm256_castps_si256(a.part[i]), 16);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to) + i, _mm256_or_si256(lower, _mm256_castps_si256(b.part[i])));
    }
  }

  // 16 x 16 words, rows next to each other, to 16 x 16 with rows and columns exchanged.
  static void transpose(const std::uint32_t* from, std::uint32_t* to) {
    for (int i = 0; i < 16; ++i) {
      for (int j = 0; j < 16; ++j) to[16 * j + i] = from[16 * i + j];
    }
  }

  static Table table(Vector values) {
    const __m128i low = to_half(values.part[0]);
    const __m128i high = to_half(values.part[1]);
    const __m128i mask = _mm_set1_epi16(0x00ff);
    return {_mm_packus_epi16(_mm_and_si128(low, mask), _mm_and_si128(high, mask)),
            _mm_packus_epi16(_mm_srli_epi16(low, 8), _mm_srli_epi16(high, 8))};
  }
  static Vector look_up(Table t, Bytes codes) {
    const __m128i low = _mm_shuffle_epi8(t.low, codes);
    const __m128i high = _mm_shuffle_epi8(t.high, codes);
    return {{_mm256_cvtph_ps(_mm_unpacklo_epi8(low, high)), _mm256_cvtph_ps(_mm_unpackhi_epi8(low, high))}};
  }

  // 32 words of 16 bits: the lower 9 bits, the upper 7.
  static void split_words(const void* p, std::uint16_t* lower, std::uint16_t* upper) {
    for (int i = 0; i < 2; ++i) {
      const __m256i words = _mm256_loadu_si256(static_cast<const __m256i*>(p) + i);
      _mm256_store_si256(reinterpret_cast<__m256i*>(lower) + i, _mm256_and_si256(words, _mm256_set1_epi16(511)));
      _mm256_store_si256(reinterpret_cast<__m256i*>(upper) + i, _mm256_srli_epi16(words, 9));
    }
  }

  static float sum(Vector v) {
    const __m256 s = _mm256_add_ps(v.part[0], v.part[1]);
    const __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    const __m128 u = _mm_add_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_add_ss(u, _mm_movehdup_ps(u)));
  }
  // The sums of 4 vectors at once, the same additions side by side.
  static void sum4(const Vector* v, float* out) {
    const __m256 s0 = _mm256_add_ps(v[0].part[0], v[0].part[1]);
    const __m256 s1 = _mm256_add_ps(v[1].part[0], v[1].part[1]);
    const __m256 s2 = _mm256_add_ps(v[2].part[0], v[2].part[1]);
    const __m256 s3 = _mm256_add_ps(v[3].part[0], v[3].part[1]);
    const __m256 t01 = _mm256_add_ps(_mm256_permute2f128_ps(s0, s1, 0x20), _mm256_permute2f128_ps(s0, s1, 0x31));
    const __m256 t23 = _mm256_add_ps(_mm256_permute2f128_ps(s2, s3, 0x20), _mm256_permute2f128_ps(s2, s3, 0x31));
    const __m256 even = _mm256_shuffle_ps(t01, t23, 0x44);
    const __m256 odd = _mm256_shuffle_ps(t01, t23, 0xee);
    const __m256 u = _mm256_add_ps(even, odd);  // per 128 bits: two of s0 (s1), two of s2 (s3)
    const __m128 low = _mm256_castps256_ps128(u);
    const __m128 high = _mm256_extractf128_ps(u, 1);
    const __m128 first = _mm_shuffle_ps(low, high, 0x88);  // s0 s2 s1 s3
    const __m128 second = _mm_shuffle_ps(low, high, 0xdd);
    const __m128 all4 = _mm_add_ps(first, second);
    _mm_storeu_ps(out, _mm_shuffle_ps(all4, all4, 0xd8));
  }
};

}  // namespace
