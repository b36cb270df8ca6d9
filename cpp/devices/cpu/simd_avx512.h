// simd_avx512.h: 16 fp32 lanes and 16 bytes on AVX-512 F, BW, DQ, VL. Only for units compiled with these flags.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "devices/cpu/halves_x86.h"
#include "devices/cpu/unroll.h"

namespace {

struct Simd : HalvesX86 {
  static constexpr int kParts = 1;
  static constexpr int kWidth = 16;
  static constexpr bool kSignMasks = true;  // signs are turned by mask, the tables hold magnitudes alone
  static constexpr int kDirectWeights = 2;  // two chains of additions hide the latency of one
  using Part = __m512;
  struct Vector {
    __m512 part[1];
  };
  using Table = __m512;  // 16 values, rounded to half already

  static Part load_part(const float* p) { return _mm512_loadu_ps(p); }
  static void store_part(float* p, Part v) { _mm512_storeu_ps(p, v); }
  // A register from here on: else the compiler loads anew for every use.
  static void keep(Part& v) { asm("" : "+v"(v)); }
  static Part zero_part() { return _mm512_setzero_ps(); }
  static Part fused(Part a, Part b, Part sum) { return _mm512_fmadd_ps(a, b, sum); }
  static Part separate(Part a, Part b, Part sum) { return _mm512_add_ps(sum, _mm512_mul_ps(a, b)); }

  static Vector load(const float* p) { return {{_mm512_loadu_ps(p)}}; }
  static void store(float* p, Vector v) { _mm512_storeu_ps(p, v.part[0]); }
  static Vector all(float x) { return {{_mm512_set1_ps(x)}}; }
  // 8 lanes of p[0], 8 of p[1]; then 4 lanes of each of p[0..3].
  static Vector pairs(const float* p) {
    return {{_mm512_insertf32x8(_mm512_castps256_ps512(_mm256_set1_ps(p[0])), _mm256_set1_ps(p[1]), 1)}};
  }
  static Vector quads(const float* p) {
    const __m512i lanes = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    return {{_mm512_permutexvar_ps(lanes, _mm512_castps128_ps512(_mm_loadu_ps(p)))}};
  }
  static Vector add(Vector a, Vector b) { return {{_mm512_add_ps(a.part[0], b.part[0])}}; }
  static Vector subtract(Vector a, Vector b) { return {{_mm512_sub_ps(a.part[0], b.part[0])}}; }
  static Vector multiply(Vector a, Vector b) { return {{_mm512_mul_ps(a.part[0], b.part[0])}}; }
  static Vector divide(Vector a, Vector b) { return {{_mm512_div_ps(a.part[0], b.part[0])}}; }
  // NaN stays NaN.
  static Vector clamp(Vector v, float low, float high) {
    return {{_mm512_max_ps(_mm512_set1_ps(low), _mm512_min_ps(_mm512_set1_ps(high), v.part[0]))}};
  }
  // 2^(v / 2) rounded down and what is left of 2^v, for whole v of -252..252.
  static void powers_of_two(Vector v, Vector* half, Vector* rest) {
    const __m512i whole = _mm512_cvtps_epi32(v.part[0]);
    const __m512i first = _mm512_srai_epi32(whole, 1);
    const __m512i second = _mm512_sub_epi32(whole, first);
    const __m512i bias = _mm512_set1_epi32(127);
    half->part[0] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(first, bias), 23));
    rest->part[0] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(second, bias), 23));
  }
  static __m256i to_half(__m512 v) { return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static Vector round_half(Vector v) { return {{_mm512_cvtph_ps(to_half(v.part[0]))}}; }
  // Every lane the half at p. A number is turned into fp32 by the integer units, which have nothing else to do.
  static Vector all_half(const std::uint8_t* p) {
    std::int16_t bits;
    std::memcpy(&bits, p, 2);
    if (((bits + 0x400) & 0x7800) == 0) [[unlikely]] {  // zero, subnormal, infinite or NaN
      return {{_mm512_cvtph_ps(_mm256_set1_epi16(bits))}};
    }
    constexpr int kSignAndValue = static_cast<int>(0x8fffe000), kBias = (127 - 15) << 23;
    const int value = ((static_cast<int>(bits) * (1 << 13)) & kSignAndValue) + kBias;
    return {{_mm512_castsi512_ps(_mm512_set1_epi32(value))}};
  }
  static __m256i load_words(const std::uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static Vector load_half(const std::uint8_t* p) { return {{_mm512_cvtph_ps(load_words(p))}}; }
  static Vector load_bf16(const std::uint8_t* p) {
    return {{_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_words(p)), 16))}};
  }
  static Vector from_signed(Bytes b) { return {{_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(b))}}; }
  static void store_half(std::uint16_t* p, Vector v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_half(v.part[0]));
  }
  // Halves saturate at +-65504, NaN passes; adds to `count` how many did.
  static Vector saturate(Vector v, std::uint64_t& count) {
    const __m512 most = _mm512_set1_ps(65504.0f);
    const __m512 sign = _mm512_set1_ps(-0.0f);
    const __mmask16 over = _mm512_cmp_ps_mask(_mm512_andnot_ps(sign, v.part[0]), most, _CMP_GT_OQ);
    count += static_cast<std::uint32_t>(__builtin_popcount(over));
    return {{_mm512_mask_or_ps(v.part[0], over, _mm512_and_ps(sign, v.part[0]), most)}};
  }

  // To bf16 and back, to nearest even. NaN passes.
  static Vector round_bf16(Vector v) {
    const __m512i bits = _mm512_castps_si512(v.part[0]);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 number = _mm512_cmp_ps_mask(v.part[0], v.part[0], _CMP_ORD_Q);
    return upper({{_mm512_castsi512_ps(_mm512_mask_mov_epi32(bits, number, up))}});
  }
  // The upper 8 significant bits of halves.
  static Vector upper(Vector v) {
    const __m512i mask = _mm512_set1_epi32(static_cast<int>(0xffff0000));
    return {{_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(v.part[0]), mask))}};
  }
#if defined(__AVX512BF16__)
  // 32 values as bf16, to nearest even.
  static void store_rounded(std::uint32_t* to, Vector a, Vector b) {
    const __m512bh both = _mm512_cvtne2ps_pbh(b.part[0], a.part[0]);
    std::memcpy(to, &both, sizeof(both));
  }
#endif

  // 16 x 16 words, rows next to each other, to 16 x 16 with rows and columns exchanged.
  static void transpose(const std::uint32_t* from, std::uint32_t* to) {
    __m512i a[16], b[16];
    EXPERTILE_UNROLL
    for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(from + 16 * i);
    EXPERTILE_UNROLL
    for (int i = 0; i < 16; i += 2) {
      b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
      b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    EXPERTILE_UNROLL
    for (int i = 0; i < 16; i += 4) {  // a[i + j]: column j of each 128 bits, of rows i .. i+3
      a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
      a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
      a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
      a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    EXPERTILE_UNROLL
    for (int j = 0; j < 4; ++j) {
      const __m512i low_even = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88);  // columns j, 8 + j of rows 0 .. 7
      const __m512i low_odd = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd);   // columns 4 + j, 12 + j
      const __m512i high_even = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
      const __m512i high_odd = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
      _mm512_storeu_si512(to + 16 * j, _mm512_shuffle_i32x4(low_even, high_even, 0x88));
      _mm512_storeu_si512(to + 16 * (4 + j), _mm512_shuffle_i32x4(low_odd, high_odd, 0x88));
      _mm512_storeu_si512(to + 16 * (8 + j), _mm512_shuffle_i32x4(low_even, high_even, 0xdd));
      _mm512_storeu_si512(to + 16 * (12 + j), _mm512_shuffle_i32x4(low_odd, high_odd, 0xdd));
    }
  }

  static Table table(Vector values) { return round_half(values).part[0]; }
  static Vector look_up(Table t, Bytes codes) { return {{_mm512_permutexvar_ps(_mm512_cvtepu8_epi32(codes), t)}}; }
  // The values of the lower nibbles in one table, of the upper in the other: what is above a lane's 4 bits does no
  // harm.
  static void look_up_nibbles(Table lower, Table upper, const std::uint8_t* p, Vector* low, Vector* high) {
    const __m512i codes = _mm512_cvtepu8_epi32(load_bytes(p));
    low->part[0] = _mm512_permutexvar_ps(codes, lower);
    high->part[0] = _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4), upper);
  }
  // The values of 16 nibbles out of 16, the lower one of a byte first.
  static Vector look_up_packed(const float* levels, std::uint64_t nibbles) {
    const __m512i bytes = _mm512_cvtepu8_epi64(_mm_cvtsi64_si128(static_cast<long long>(nibbles)));
    const __m512i codes = _mm512_or_si512(bytes, _mm512_slli_epi64(bytes, 28));
    return {{_mm512_permutexvar_ps(codes, _mm512_load_ps(levels))}};
  }
  // The upper 4 bits of 8 words, in lanes 0 .. 7.
  static Vector upper_nibbles(const std::uint8_t* p) {
    return {{_mm512_castps256_ps512(_mm256_cvtepi32_ps(_mm256_srli_epi32(load_wide(p), 28)))}};
  }
  // Four times each of the lanes 4 * quad .. 4 * quad + 3.
  static Vector four_times(Vector v, int quad) {
    const __m512i lanes = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    return {{_mm512_permutexvar_ps(_mm512_add_epi32(lanes, _mm512_set1_epi32(4 * quad)), v.part[0])}};
  }
  // Four pieces of a grid, of 16 bytes each, whose places are in bytes.
  static __m512i load_pieces(const std::uint8_t* grid, const std::uint16_t* place) {
    const auto piece = [&](int i) { return _mm_load_si128(reinterpret_cast<const __m128i*>(grid + place[i])); };
    __m512i codes = _mm512_inserti32x4(_mm512_castsi128_si512(piece(0)), piece(1), 1);
    codes = _mm512_inserti32x4(codes, piece(2), 2);
    return _mm512_inserti32x4(codes, piece(3), 3);
  }
  // The values of 16 codes, a lane each, in four pieces of a grid.
  static Vector look_up_lanes(Table t, const std::uint8_t* grid, const std::uint16_t* place) {
    return {{_mm512_permutexvar_ps(load_pieces(grid, place), t)}};
  }
  // 16 codes of 0..3, a lane each, out of the four values at p.
  static Vector look_up_four(const float* p, const std::uint8_t* first, const std::uint8_t* second) {
    const __m256i low = _mm256_load_si256(reinterpret_cast<const __m256i*>(first));
    const __m256i high = _mm256_load_si256(reinterpret_cast<const __m256i*>(second));
    const __m512i codes = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    return {{_mm512_permutevar_ps(_mm512_broadcast_f32x4(_mm_load_ps(p)), codes)}};
  }

  // 32 words of 16 bits: the lower 9 bits, times 2^Shift; of the upper 7, as the lower bits of a byte, the byte of even
  // parity.
  template <int Shift>
  static void split_words(const void* p, std::uint16_t* lower, std::uint8_t* signs) {
    const __m512i words = _mm512_loadu_si512(p);
    store_places(lower, _mm512_and_si512(_mm512_slli_epi16(words, Shift), _mm512_set1_epi16(511 << Shift)));
    store_wide(signs, upper_sevens(words));
  }
  // 8 words of four times 7 bits: each as the lower bits of a byte of even parity. The 4 bits above are left alone.
  static void split_sevens(__m256i words, std::uint8_t* signs) {
    const auto part = [&](int i) {
      return _mm256_and_si256(_mm256_slli_epi32(words, i), _mm256_set1_epi32(127 << (8 * i)));
    };
    store_wide(signs, even_parity(either(either(part(0), part(1)), either(part(2), part(3)))));
  }
  // 8 times 8 bytes: the lower four as the places of a grid's pieces of 32 bytes, the upper ones as above.
  static void split_pairs(const void* p, std::uint16_t* place, std::uint8_t* signs) {
    const __m512i pairs = _mm512_loadu_si512(p);
    store_places(place, _mm512_slli_epi16(_mm512_cvtepu8_epi16(_mm512_cvtepi64_epi32(pairs)), 5));
    split_sevens(_mm512_cvtepi64_epi32(_mm512_srli_epi64(pairs, 32)), signs);
  }
  // The values of the upper 4 bits of 8 times 8 bytes, in lanes 0 .. 7.
  static Vector look_up_top(const float* levels, const void* p) {
    const __m256i top = _mm512_cvtepi64_epi32(_mm512_srli_epi64(_mm512_loadu_si512(p), 60));
    return {{_mm512_permutexvar_ps(_mm512_castsi256_si512(top), _mm512_load_ps(levels))}};
  }
  // 32 bytes as the places of a grid's pieces of 16 bytes, those whose bit is set in `high` 256 pieces further.
  static void store_places(std::uint16_t* to, const std::uint8_t* p, std::uint32_t high) {
    const __m512i index = _mm512_slli_epi16(_mm512_cvtepu8_epi16(load_wide(p)), 4);
    const __m512i far = _mm512_set1_epi16(256 << 4);
    store_places(to, _mm512_or_si512(index, _mm512_maskz_mov_epi16(high, far)));
  }
  // As two halves: a load of a single word waits longer behind a store of 64 bytes than behind one of 32.
  static void store_places(std::uint16_t* to, __m512i places) {
    store_wide(to, _mm512_castsi512_si256(places));
    store_wide(to + 16, _mm512_extracti64x4_epi64(places, 1));
  }
  // `low` in the lower 32 bytes, `high` in the upper.
  static __m512i two(int low, int high) {
    return _mm512_inserti64x4(_mm512_set1_epi32(low), _mm256_set1_epi32(high), 1);
  }
  // The 256 codes of 5 bits of a block: four times 32 bytes of nibbles, the lower ones before the upper; of the fifth
  // bits 32 bytes, bit i of each for the i-th 32 codes. A rotation takes them to bit 4 of the byte that they are in.
  static void join_five_bits(const std::uint8_t* nibbles, const std::uint8_t* fifth, std::uint8_t* codes) {
    const auto twice = [](const std::uint8_t* p) { return _mm512_broadcast_i64x4(load_wide(p)); };
    const __m512i bits = twice(fifth);
    EXPERTILE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const __m512i low = _mm512_srlv_epi32(twice(nibbles + 32 * i), two(0, 4));
      const __m512i high = _mm512_rolv_epi32(bits, two(36 - 2 * i, 35 - 2 * i));
      constexpr int kChoose = 0xe4;  // the bits of `low` where the mask is set, else of `high`
      const __m512i code = _mm512_ternarylogic_epi32(low, high, _mm512_set1_epi8(15), kChoose);
      _mm512_store_si512(codes + 64 * i, _mm512_and_si512(code, _mm512_set1_epi8(31)));
    }
  }
  // Lane i with its sign turned where bit i of `mask` is set.
  static Vector flip(Vector v, std::uint32_t mask) {
    return {{_mm512_mask_xor_ps(v.part[0], static_cast<__mmask16>(mask), v.part[0], _mm512_set1_ps(-0.0f))}};
  }

  static float sum(Vector v) {
    const __m256 s = _mm256_add_ps(_mm512_castps512_ps256(v.part[0]), _mm512_extractf32x8_ps(v.part[0], 1));
    const __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    const __m128 u = _mm_add_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_add_ss(u, _mm_movehdup_ps(u)));
  }
  // The sums of 4 vectors at once, the same additions side by side.
  static void sum4(const Vector* v, float* out) {
    const __m512 s01 = _mm512_add_ps(_mm512_shuffle_f32x4(v[0].part[0], v[1].part[0], 0x44),
                                     _mm512_shuffle_f32x4(v[0].part[0], v[1].part[0], 0xee));
    const __m512 s23 = _mm512_add_ps(_mm512_shuffle_f32x4(v[2].part[0], v[3].part[0], 0x44),
                                     _mm512_shuffle_f32x4(v[2].part[0], v[3].part[0], 0xee));
    const __m512 t = _mm512_add_ps(_mm512_shuffle_f32x4(s01, s23, 0x88), _mm512_shuffle_f32x4(s01, s23, 0xdd));
    const __m512 u = _mm512_add_ps(t, _mm512_permute_ps(t, 0x4e));  // per 128 bits: the sums of one vector
    const __m512 whole = _mm512_add_ps(u, _mm512_permute_ps(u, 0xb1));
    const __m512i first = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 8, 4, 0);
    _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_permutexvar_ps(first, whole)));
  }
};

}  // namespace
