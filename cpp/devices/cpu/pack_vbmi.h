// pack_vbmi.h: decoders that write bf16 themselves: 32 weights a look-up of bytes (AVX-512 VBMI), for the amx table.
//
// The table of a scale's 16 values holds 32 bits each: the upper half a weight's high part (or the weight, rounded),
// the lower half its low part. Codes, spread to two bytes each, pick either half. The same bits as through the fp32
// decoders.
#pragma once

#include "devices/cpu/decode_grid.h"

namespace {

template <bool Exact>
inline __m512i bf16_table(Vector values) {
  if constexpr (!Exact) return _mm512_castps_si512(Simd::round_bf16(values).part[0]);
  const Vector upper = Simd::upper(values);
  const __m512i low = _mm512_castps_si512(Simd::subtract(values, upper).part[0]);
  return _mm512_or_si512(_mm512_castps_si512(upper.part[0]), _mm512_srli_epi32(low, 16));
}

// The weights of 32 codes, those whose bit is set in `minus` with their sign turned; `first` is the first entry of the
// table that each code counts from, as the places of its upper half: 4 * entry + 2 and + 3.
template <bool Exact>
inline void look_up_32(__m512i table, __m256i codes, __m512i first, std::uint32_t minus, std::uint32_t* high,
                       std::uint32_t* low) {
  const __m512i spread = _mm512_mullo_epi16(_mm512_cvtepu8_epi16(codes), _mm512_set1_epi16(0x0404));
  const __m512i places = _mm512_add_epi16(spread, first);
  const __m512i sign = _mm512_set1_epi16(-0x8000);
  const auto mask = static_cast<__mmask32>(minus);
  const __m512i upper = _mm512_permutexvar_epi8(places, table);
  _mm512_storeu_si512(high, _mm512_mask_add_epi16(upper, mask, upper, sign));
  if constexpr (Exact) {
    const __m512i rest = _mm512_permutexvar_epi8(_mm512_sub_epi16(places, _mm512_set1_epi16(0x0202)), table);
    _mm512_storeu_si512(low, _mm512_mask_add_epi16(rest, mask, rest, sign));
  }
}

inline __m256i join(Bytes a, Bytes b) { return _mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1); }

template <bool Exact>
void pack_iq2_xs(const std::uint8_t* p, std::size_t n, std::uint32_t* high, std::uint32_t* low) {
  const GridCodes& grid = expertile::cpu::grid_codes;
  // Entries of the table that 16 weights of the scales 0, 1 or 2, 3 count from.
  const __m512i scales01 = _mm512_inserti64x4(_mm512_set1_epi16(0x0302), _mm256_set1_epi16(0x1312), 1);
  const __m512i scales23 = _mm512_add_epi16(scales01, _mm512_set1_epi16(0x2020));
  for (std::size_t k = 0; k < n; k += IQ2_XS::elements, p += IQ2_XS::bytes) {
    alignas(64) float scale[16];
    alignas(64) std::uint16_t entry[32];
    alignas(64) std::uint8_t signs[32];
    iq2_scales(Simd::half_at(p), p + 66, scale);
    Simd::split_words(p + 2, entry, signs);
    EXPERTILE_UNROLL
    for (int i = 0; i < 8; ++i, high += 16, low += Exact ? 16 : 0) {
      const Vector values = Simd::multiply(Simd::quads(scale + i / 2 * 4), Simd::load(kIq2Magnitudes));
      const __m512i table = bf16_table<Exact>(Simd::round_half(values));
      const auto codes = [&](int j) { return grid.iq2_xs[entry[4 * i + j]]; };
      const __m256i all = join(Simd::load_two(codes(0), codes(1)), Simd::load_two(codes(2), codes(3)));
      look_up_32<Exact>(table, all, i % 2 == 0 ? scales01 : scales23, load_u32(signs + 4 * i), high, low);
    }
  }
}

template <bool Exact>
void pack_iq4_nl(const std::uint8_t* p, std::size_t n, std::uint32_t* high, std::uint32_t* low) {
  for (std::size_t k = 0; k < n; k += 32, p += IQ4_NL::bytes, high += 16, low += Exact ? 16 : 0) {
    const Vector values = Simd::multiply(Simd::all(Simd::half_at(p)), Simd::load(kIq4Levels));
    const Bytes q = Simd::load_bytes(p + 2);
    look_up_32<Exact>(bf16_table<Exact>(Simd::round_half(values)), join(low_nibbles(q), high_nibbles(q)),
                      _mm512_set1_epi16(0x0302), 0, high, low);
  }
}

// The table's formats, with these decoders where there is one.
expertile::cpu::FormatKernels packing_format(expertile::Type type) {
  expertile::cpu::FormatKernels kernels = format<true>(type);
  if (type == expertile::Type::IQ2_XS) {
    kernels.pack = [](const std::uint8_t* p, std::size_t n, std::uint32_t* high, std::uint32_t* low) {
      low == nullptr ? pack_iq2_xs<false>(p, n, high, low) : pack_iq2_xs<true>(p, n, high, low);
    };
  } else if (type == expertile::Type::IQ4_NL) {
    kernels.pack = [](const std::uint8_t* p, std::size_t n, std::uint32_t* high, std::uint32_t* low) {
      low == nullptr ? pack_iq4_nl<false>(p, n, high, low) : pack_iq4_nl<true>(p, n, high, low);
    };
  }
  return kernels;
}

}  // namespace
