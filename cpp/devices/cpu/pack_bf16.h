// pack_bf16.h: decoders that write bf16 themselves, 32 weights a look-up of words, for the tables with tiles.
//
// A table holds 32 values as bf16, rounded, or two tables their high and their low parts. The same bits as through the
// fp32 decoders.
#pragma once

#include "devices/cpu/decode_grid.h"

namespace {

template <bool Exact>
struct WordTable {
  __m512i high, low;

  WordTable(Vector a, Vector b) {
    alignas(64) std::uint32_t parts[2][16] = {};
    store_weights<Exact>(a, b, parts[0], parts[1]);
    high = _mm512_load_si512(parts[0]);
    low = _mm512_load_si512(parts[1]);
  }
  // The weights of 32 codes, those whose bit is set in `minus` with their sign turned.
  void look_up(__m512i codes, std::uint32_t minus, std::uint32_t* to_high, std::uint32_t* to_low) const {
    store(_mm512_permutexvar_epi16(codes, high), minus, to_high);
    if constexpr (Exact) store(_mm512_permutexvar_epi16(codes, low), minus, to_low);
  }

 private:
  static void store(__m512i v, std::uint32_t minus, std::uint32_t* to) {
    const __m512i sign = _mm512_set1_epi16(-0x8000);
    _mm512_storeu_si512(to, _mm512_mask_add_epi16(v, static_cast<__mmask32>(minus), v, sign));
  }
};

// The first code of each of a table's 8 scales, for 32 weights of two of them.
alignas(64) constexpr std::uint16_t kFirstCode[4][32] = {
    {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4},
    {8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 12, 12, 12, 12, 12, 12, 12, 12, 12, 12, 12, 12, 12, 12, 12, 12},
    {16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16,
     20, 20, 20, 20, 20, 20, 20, 20, 20, 20, 20, 20, 20, 20, 20, 20},
    {24, 24, 24, 24, 24, 24, 24, 24, 24, 24, 24, 24, 24, 24, 24, 24,
     28, 28, 28, 28, 28, 28, 28, 28, 28, 28, 28, 28, 28, 28, 28, 28}};

template <bool Exact>
void pack_iq2_xs(const std::uint8_t* p, std::size_t n, std::uint32_t* high, std::uint32_t* low) {
  const auto* grid = reinterpret_cast<const std::uint8_t*>(expertile::cpu::grid_codes.iq2_xs_words);
  for (std::size_t k = 0; k < n; k += IQ2_XS::elements, p += IQ2_XS::bytes) {
    alignas(64) std::uint16_t place[32];  // in bytes
    alignas(64) std::uint8_t signs[32];
    alignas(64) float values[64];
    iq2_values(p, p + 66, expertile::cpu::grid_codes, values);
    Simd::split_words<4>(p + 2, place, signs);
    Simd::in_memory(place);
    Simd::in_memory(signs);
    for (int half = 0; half < 2; ++half) {
      const WordTable<Exact> table(Simd::load(values + 32 * half), Simd::load(values + 32 * half + 16));
      EXPERTILE_UNROLL
      for (int i = 0; i < 4; ++i, high += 16, low += Exact ? 16 : 0) {
        const int at = 16 * half + 4 * i;
        const __m512i codes = _mm512_or_si512(Simd::load_pieces(grid, place + at), _mm512_load_si512(kFirstCode[i]));
        table.look_up(codes, load_u32(signs + at), high, low);
      }
    }
  }
}

// Two blocks in one table, the second's 16 values behind the first's; the last of an odd number is its own second.
template <bool Exact>
void pack_iq4_nl(const std::uint8_t* p, std::size_t n, std::uint32_t* high, std::uint32_t* low) {
  const __m512i nibble = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
  const __m512i second = _mm512_set1_epi16(16), lower = _mm512_set1_epi16(15);
  const auto values = [](const std::uint8_t* block) { return Vector{{half_scaled_table(kIq4Levels, block)}}; };
  const auto codes = [&](const std::uint8_t* block) {
    const __m512i bytes = _mm512_cvtepu8_epi16(_mm256_broadcastsi128_si256(Simd::load_bytes(block + 2)));
    return _mm512_and_si512(_mm512_srlv_epi16(bytes, nibble), lower);
  };
  for (std::size_t k = 0; k < n; k += 64, p += 2 * IQ4_NL::bytes, high += 32, low += Exact ? 32 : 0) {
    const bool two = k + 32 < n;
    const std::uint8_t* q = two ? p + IQ4_NL::bytes : p;
    const WordTable<Exact> table(values(p), values(q));
    table.look_up(codes(p), 0, high, low);
    if (two) table.look_up(_mm512_or_si512(codes(q), second), 0, high + 16, Exact ? low + 16 : nullptr);
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
