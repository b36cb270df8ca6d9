// decode_grid.h: the decoders of the IQ2 and IQ3 types: grid entries as codes, added to sign codes, then looked up.
#pragma once

#include "devices/cpu/decode.h"

namespace {

// The weights of 16 magnitude codes and their signs. By mask where the registers have masks; else the sign is a bit of
// the code, `Bit` above the magnitudes, and the table's upper half (of each part) is negative.
template <int Bit, class S = Simd>
inline Vector signed_look_up(Table table, Bytes codes, std::uint32_t signs, const GridCodes& grid) {
  if constexpr (S::kSignMasks) {
    return S::flip(Simd::look_up(table, codes), signs);
  } else {
    const auto& sign = Bit == 4 ? grid.sign4 : grid.sign8;
    return Simd::look_up(table, Simd::bit_or(codes, Simd::load_two(sign[signs & 255], sign[signs >> 8])));
  }
}

// The same by codes, from twice 7 bits, the eighth of each being their parity.
template <int Bit>
inline Vector parity_look_up(Table table, Bytes codes, std::uint32_t twice, const GridCodes& grid) {
  const auto& sign = Bit == 4 ? grid.parity4 : grid.parity8;
  return Simd::look_up(table, Simd::bit_or(codes, Simd::load_two(sign[twice & 127], sign[(twice >> 7) & 127])));
}

// The 16 scales of IQ2_XS and IQ2_S, of 16 weights each.
inline void iq2_scales(float d, const std::uint8_t* packed, float* scale) {
  const Bytes both = Simd::load_two(packed, packed);
  const Vector nibble = Simd::from_signed(Simd::zip_low(low_nibbles(both), high_nibbles(both)));
  const Vector sum = Simd::add(Simd::all(0.5f), nibble);
  Simd::store(scale, Simd::multiply(Simd::multiply(Simd::all(d), sum), Simd::all(0.25f)));
}

// (0.5 + nibble) / 4.
alignas(64) constexpr float kIq2Scales[16] = {0.125f, 0.375f, 0.625f, 0.875f, 1.125f, 1.375f, 1.625f, 1.875f,
                                              2.125f, 2.375f, 2.625f, 2.875f, 3.125f, 3.375f, 3.625f, 3.875f};

// The magnitudes (and a zero) of d, the half at p, times 4 * n_quads scales.
template <class S = Simd>
inline void put_magnitudes(const std::uint8_t* p, Vector scales, int n_quads, float* values) {
  const Vector magnitudes = S::multiply(S::all_half(p), S::load(kIq2Magnitudes));
  EXPERTILE_UNROLL
  for (int quad = 0; quad < n_quads; ++quad) {
    S::store(values + 16 * quad, S::round_half(S::multiply(S::four_times(scales, quad), magnitudes)));
  }
}

// The same for the 16 scales at `packed`.
template <class S = Simd>
inline void iq2_values(const std::uint8_t* p, const std::uint8_t* packed, const GridCodes& grid, float (&values)[64]) {
  if constexpr (S::kHalfProducts) {
    S::look_up_nibble_quads(grid.iq2_quads, packed, p, values);
  } else {
    put_magnitudes(p, S::look_up_packed(kIq2Scales, load_u64(packed)), 4, values);
  }
  S::in_memory(values);
}

// 256 weights where signs are turned by mask: a scale's four values for `step` times 16 weights, and for 8 the place in
// the grid, whose codes are a lane each.
template <class Sink, class S = Simd>
inline void put_iq2(Sink& sink, const float* values, int step, const std::uint32_t* grid, const std::uint16_t* place,
                    const std::uint8_t* signs) {
  const auto* lanes = reinterpret_cast<const std::uint8_t*>(grid);
  EXPERTILE_UNROLL
  for (int i = 0; i < 16; ++i) {
    const Vector v = S::look_up_four(values + 4 * (i / step), lanes + place[2 * i], lanes + place[2 * i + 1]);
    sink.put(i, S::flip(v, load_u16(signs + 2 * i)));
  }
}

struct IQ2_XXS {
  static constexpr std::size_t elements = 256, bytes = 66;
  template <class Sink, class S = Simd>
  static void decode(const std::uint8_t* p, const GridCodes& grid, Sink& sink) {
    if constexpr (S::kSignMasks) {
      alignas(64) std::uint16_t place[32];
      alignas(64) std::uint8_t signs[32];
      alignas(64) float values[32];
      S::split_pairs(p + 2, place, signs);
      S::in_memory(place);
      S::in_memory(signs);
      if constexpr (S::kHalfProducts) {
        S::look_up_top_quads(grid.iq2_quads, p + 2, p, values);
      } else {
        put_magnitudes(p, S::look_up_top(kIq2Scales, p + 2), 2, values);
      }
      S::in_memory(values);
      put_iq2(sink, values, 2, grid.iq2_xxs_lanes[0], place, signs);
    } else {
      const float d = Simd::half_at(p);
      for (int i = 0; i < 8; ++i) {
        const std::uint8_t* index = p + 2 + 8 * i;
        const std::uint32_t word = load_u32(index + 4);
        const Table table = scaled_table(kIq2Levels, d * (0.5f + static_cast<float>(word >> 28)) * 0.25f);
        for (int half = 0; half < 2; ++half) {
          const std::uint8_t* two = index + 2 * half;
          const Bytes code = Simd::load_two(grid.iq2_xxs[two[0]], grid.iq2_xxs[two[1]]);
          sink.put(2 * i + half, parity_look_up<4>(table, code, word >> (14 * half), grid));
        }
      }
    }
  }
};

struct IQ2_XS {
  static constexpr std::size_t elements = 256, bytes = 74;
  template <class Sink, class S = Simd>
  static void decode(const std::uint8_t* p, const GridCodes& grid, Sink& sink) {
    alignas(64) std::uint16_t entry[32];
    if constexpr (S::kSignMasks) {
      alignas(64) std::uint8_t signs[32];
      S::template split_words<5>(p + 2, entry, signs);  // places in bytes
      S::in_memory(entry);
      S::in_memory(signs);
      alignas(64) float values[64];
      iq2_values(p, p + 66, grid, values);
      put_iq2(sink, values, 1, grid.iq2_xs_lanes[0], entry, signs);
    } else {
      alignas(64) float scale[16];
      iq2_scales(Simd::half_at(p), p + 66, scale);
      alignas(64) std::uint16_t sign[32];
      S::split_words(p + 2, entry, sign);
      for (int pair = 0; pair < 8; ++pair) {  // twice 16 weights, of two scales, in one table
        const Table table = Simd::table(Simd::multiply(Simd::pairs(scale + 2 * pair), Simd::load(kIq2Levels)));
        EXPERTILE_UNROLL
        for (int half = 0; half < 2; ++half) {
          const int i = 2 * pair + half;
          const Bytes code = Simd::load_two(grid.iq2_xs[entry[2 * i]], grid.iq2_xs[entry[2 * i + 1]]);
          const Bytes signs = Simd::load_two(grid.parity4[sign[2 * i]], grid.parity4[sign[2 * i + 1]]);
          const Bytes upper = Simd::every(static_cast<std::uint8_t>(8 * half));
          sink.put(i, Simd::look_up(table, Simd::bit_or(Simd::bit_or(code, signs), upper)));
        }
      }
    }
  }
};

struct IQ2_S {
  static constexpr std::size_t elements = 256, bytes = 82;
  template <class Sink>
  static void decode(const std::uint8_t* p, const GridCodes& grid, Sink& sink) {
    alignas(64) float scale[16];
    iq2_scales(Simd::half_at(p), p + 74, scale);
    const Bytes upper = Simd::every(8);
    for (int i = 0; i < 8; ++i) {
      const Table table = Simd::table(Simd::multiply(Simd::pairs(scale + 2 * i), Simd::load(kIq2Levels)));
      const std::uint8_t* index = p + 2 + 4 * i;
      const std::uint8_t* signs = index + 32;
      const std::uint32_t high = p[66 + i];
      const auto entry = [&](int l) { return grid.iq2_s[index[l] | ((high << (8 - 2 * l)) & 0x300)]; };
      sink.put(2 * i, signed_look_up<4>(table, Simd::load_two(entry(0), entry(1)), load_u16(signs), grid));
      const Bytes codes = Simd::bit_or(Simd::load_two(entry(2), entry(3)), upper);
      sink.put(2 * i + 1, signed_look_up<4>(table, codes, load_u16(signs + 2), grid));
    }
  }
};

// 256 weights of the IQ3 types where signs are turned by mask: of 32 weights the scale, of 4 the place in the grid.
template <class Sink, class S = Simd>
inline void put_iq3(Sink& sink, const float* levels, const float* scale, const std::uint8_t* grid,
                    const std::uint16_t* place, const std::uint8_t* signs) {
  for (int i = 0; i < 8; ++i) {
    const Table table = scaled_table(levels, scale[i]);
    EXPERTILE_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int at = 2 * i + half;
      sink.put(at, S::flip(S::look_up_lanes(table, grid, place + 4 * at), load_u16(signs + 2 * at)));
    }
  }
}

struct IQ3_XXS {
  static constexpr std::size_t elements = 256, bytes = 98;
  template <class Sink, class S = Simd>
  static void decode(const std::uint8_t* p, const GridCodes& grid, Sink& sink) {
    if constexpr (S::kSignMasks) {
      alignas(64) std::uint16_t place[64];
      alignas(64) std::uint8_t signs[32];
      alignas(64) float scale[16];
      S::store_places(place, p + 2, 0);
      S::store_places(place + 32, p + 34, 0);
      S::split_sevens(S::load_wide(p + 66), signs);
      S::in_memory(place);
      S::in_memory(signs);
      const Vector sums = S::add(S::all(0.5f), S::upper_nibbles(p + 66));
      S::store(scale, S::multiply(S::multiply(S::all_half(p), sums), S::all(0.5f)));
      put_iq3(sink, kIq3XxsLevels, scale, reinterpret_cast<const std::uint8_t*>(grid.iq3_xxs_lanes), place, signs);
      return;
    }
    const float d = Simd::half_at(p);
    for (int i = 0; i < 8; ++i) {
      const std::uint32_t word = load_u32(p + 66 + 4 * i);
      const Table table = scaled_table(kIq3XxsLevels, d * (0.5f + static_cast<float>(word >> 28)) * 0.5f);
      for (int half = 0; half < 2; ++half) {
        const std::uint8_t* q = p + 2 + 8 * i + 4 * half;
        const Bytes code =
            Simd::load_four(grid.iq3_xxs[q[0]], grid.iq3_xxs[q[1]], grid.iq3_xxs[q[2]], grid.iq3_xxs[q[3]]);
        sink.put(2 * i + half, parity_look_up<8>(table, code, word >> (14 * half), grid));
      }
    }
  }
};

// 1 + 2 * nibble.
alignas(64) constexpr float kIq3SScales[16] = {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};

struct IQ3_S {
  static constexpr std::size_t elements = 256, bytes = 110;
  template <class Sink, class S = Simd>
  static void decode(const std::uint8_t* p, const GridCodes& grid, Sink& sink) {
    if constexpr (S::kSignMasks) {
      alignas(64) float scale[16];
      S::store(scale, S::multiply(S::all_half(p), S::look_up_packed(kIq3SScales, load_u32(p + 106))));
      alignas(64) std::uint16_t place[64];
      S::store_places(place, p + 2, load_u32(p + 66));
      S::store_places(place + 32, p + 34, load_u32(p + 70));
      S::in_memory(place);
      put_iq3(sink, kIq3SLevels, scale, reinterpret_cast<const std::uint8_t*>(grid.iq3_s_lanes), place, p + 74);
      return;
    }
    const float d = Simd::half_at(p);
    for (int i = 0; i < 8; ++i) {
      const int nibble = (p[106 + i / 2] >> (4 * (i % 2))) & 15;
      const Table table = scaled_table(kIq3SLevels, d * static_cast<float>(1 + 2 * nibble));
      const std::uint32_t high = p[66 + i];
      for (int half = 0; half < 2; ++half) {
        const std::uint8_t* q = p + 2 + 8 * i + 4 * half;
        const std::uint8_t* signs = p + 74 + 4 * i + 2 * half;
        const auto entry = [&](int l) { return grid.iq3_s[q[l] | (((high >> (4 * half + l)) & 1) << 8)]; };
        const Bytes code = Simd::load_four(entry(0), entry(1), entry(2), entry(3));
        sink.put(2 * i + half, signed_look_up<8>(table, code, load_u16(signs), grid));
      }
    }
  }
};

}  // namespace
