// halves_x86.h: what AVX512-FP16, VBMI and GFNI together do better than AVX-512 by itself.
//
// A product of two halves is rounded once. Where a format's values are its scale, a half, times numbers that are exact
// as halves, that is the rounding which the decoders owe, and fp32 need not come in between.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "devices/cpu/bytes_x86.h"
#include "devices/cpu/unroll.h"

namespace {

#if defined(__AVX512FP16__) && defined(__AVX512VBMI__) && defined(__GFNI__)

struct HalvesX86 : BytesX86 {
  static constexpr bool kHalfProducts = true;

  // Every half the one at p.
  static __m512i all_halves(const std::uint8_t* p) {
    std::int16_t bits;
    std::memcpy(&bits, p, 2);
    return _mm512_set1_epi16(bits);
  }
  // 16 exact halves times the half at p, as fp32.
  static __m512 products(__m256i exact, const std::uint8_t* p) {
    const __m256h scale = _mm256_castsi256_ph(_mm512_castsi512_si256(all_halves(p)));
    return _mm512_cvtph_ps(_mm256_castph_si256(_mm256_mul_ph(_mm256_castsi256_ph(exact), scale)));
  }
  // quads[n] times `scale`, four values each, for 8 numbers n: the lower 4 bits of the lanes of `which`.
  static void look_up_quads(const std::uint16_t (&quads)[16][4], __m512i which, __m512i scale, float* to) {
    const __m512i exact = _mm512_permutex2var_epi64(_mm512_load_si512(quads), which, _mm512_load_si512(quads + 8));
    const __m512h product = _mm512_mul_ph(_mm512_castsi512_ph(exact), _mm512_castsi512_ph(scale));
    const __m512i values = _mm512_castph_si512(product);
    _mm512_store_ps(to, _mm512_cvtph_ps(_mm512_castsi512_si256(values)));
    _mm512_store_ps(to + 16, _mm512_cvtph_ps(_mm512_extracti64x4_epi64(values, 1)));
  }
  // The same for the 16 nibbles at `packed`, the lower one of a byte first, and the half at p.
  static void look_up_nibble_quads(const std::uint16_t (&quads)[16][4], const std::uint8_t* packed,
                                   const std::uint8_t* p, float* to) {
    alignas(64) static constexpr std::uint64_t kShift[2][8] = {{0, 4, 8, 12, 16, 20, 24, 28},
                                                               {32, 36, 40, 44, 48, 52, 56, 60}};
    std::uint64_t all;
    std::memcpy(&all, packed, 8);
    const __m512i nibbles = _mm512_set1_epi64(static_cast<long long>(all)), scale = all_halves(p);
    EXPERTILE_UNROLL
    for (int i = 0; i < 2; ++i) {
      const __m512i which = _mm512_multishift_epi64_epi8(_mm512_load_si512(kShift[i]), nibbles);
      look_up_quads(quads, which, scale, to + 32 * i);
    }
  }
  // And for the upper 4 bits of the 8 times 8 bytes at `packed`.
  static void look_up_top_quads(const std::uint16_t (&quads)[16][4], const std::uint8_t* packed, const std::uint8_t* p,
                                float* to) {
    look_up_quads(quads, _mm512_srli_epi64(_mm512_loadu_si512(packed), 60), all_halves(p), to);
  }

  // Bytes of 7 bits with their parity as the eighth: by a matrix of bits, its last row first.
  static Wide even_parity(Wide seven) {
    return _mm256_gf2p8affine_epi64_epi8(seven, _mm256_set1_epi64x(0x010204081020407f), 0);
  }
  // The upper 7 bits of 32 words, as the lower bits of a byte of even parity.
  static Wide upper_sevens(__m512i words) {
    alignas(64) static constexpr std::uint8_t kUpper[64] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21,
                                                            23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43,
                                                            45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    const __m512i bytes = _mm512_gf2p8affine_epi64_epi8(words, _mm512_set1_epi64(0x02040810204080fe), 0);
    return _mm512_castsi512_si256(_mm512_permutexvar_epi8(_mm512_load_si512(kUpper), bytes));
  }
};

#else

struct HalvesX86 : BytesX86 {
  static constexpr bool kHalfProducts = false;

  // Shifts by words: what they carry over never reaches a lowest bit.
  static Wide even_parity(Wide seven) {
    Wide folded = _mm256_xor_si256(seven, _mm256_srli_epi16(seven, 4));
    folded = _mm256_xor_si256(folded, _mm256_srli_epi16(folded, 2));
    folded = _mm256_xor_si256(folded, _mm256_srli_epi16(folded, 1));
    return either(seven, take_bits(folded, 0, 1, 7));
  }
  static Wide upper_sevens(__m512i words) { return even_parity(_mm512_cvtepi16_epi8(_mm512_srli_epi16(words, 9))); }
};

#endif

}  // namespace
