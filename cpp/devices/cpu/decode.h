// decode.h: the quant blocks of the formats whose weights are a table look-up or plain arithmetic, 16 weights a step.
//
// Included after one of simd_*.h, which gives `Simd`. Each decoder hands its block's weights, rounded to half and in
// fp32 again, to sink.put(i, the weights 16*i .. 16*i+15). Where a scale's weights take at most 16 values, the values
// are rounded once, as a table, and the weights are looked up: bit for bit what decoding one by one gives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "devices/cpu/kernels.h"
#include "devices/cpu/unroll.h"

namespace {

using Vector = Simd::Vector;
using Bytes = Simd::Bytes;
using Table = Simd::Table;
using Wide = Simd::Wide;
using expertile::cpu::GridCodes;

inline Bytes low_nibbles(Bytes q) { return Simd::bit_and(q, Simd::every(15)); }
inline Bytes high_nibbles(Bytes q) { return Simd::shift_right(q, 4); }

inline std::uint32_t load_u32(const std::uint8_t* p) {
  std::uint32_t word;
  std::memcpy(&word, p, 4);
  return word;
}
inline std::uint64_t load_u64(const std::uint8_t* p) {
  std::uint64_t word;
  std::memcpy(&word, p, 8);
  return word;
}
inline std::uint32_t load_u16(const std::uint8_t* p) {
  std::uint16_t word;
  std::memcpy(&word, p, 2);
  return word;
}

alignas(64) constexpr float kCount[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
alignas(64) constexpr float kCountMinus8[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
alignas(64) constexpr float kCount4[16] = {0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3};
alignas(64) constexpr float kQ2Levels[16] = {-1, 0, 1, 2, -1, 0, 1, 2, -1, 0, 1, 2, -1, 0, 1, 2};
alignas(64) constexpr float kQ3Levels[16] = {-4, -3, -2, -1, 0, 1, 2, 3, -4, -3, -2, -1, 0, 1, 2, 3};
alignas(64) constexpr float kIq2Levels[16] = {8, 25, 43, 0, -8, -25, -43, 0, 8, 25, 43, 0, -8, -25, -43, 0};
alignas(64) constexpr float kIq2Magnitudes[16] = {8, 25, 43, 0, 8, 25, 43, 0, 8, 25, 43, 0, 8, 25, 43, 0};
alignas(64) constexpr float kIq3XxsLevels[16] = {4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62};
alignas(64) constexpr float kIq3SLevels[16] = {1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15};
alignas(64) constexpr float kIq4Levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// The table of `levels` times the one scale of 16 or 32 weights.
inline Table scaled_table(const float* levels, float scale) {
  return Simd::table(Simd::multiply(Simd::all(scale), Simd::load(levels)));
}

// The table of `levels`, all of them halves, times the half at p.
template <class S = Simd>
inline Table half_scaled_table(const float* levels, const std::uint8_t* p) {
  if constexpr (S::kHalfProducts) {
    return S::products(S::to_half(S::load(levels).part[0]), p);
  } else if constexpr (S::kSignMasks) {
    return S::table(S::multiply(S::all_half(p), S::load(levels)));
  } else {
    return scaled_table(levels, S::half_at(p));
  }
}

// The values of the lower nibbles of 16 bytes in one table, of the upper in the other.
template <class S = Simd>
inline void look_up_nibbles(Table lower, Table upper, const std::uint8_t* p, Vector* low, Vector* high) {
  if constexpr (S::kSignMasks) {
    S::look_up_nibbles(lower, upper, p, low, high);
  } else {
    const Bytes q = S::load_bytes(p);
    *low = S::look_up(lower, low_nibbles(q));
    *high = S::look_up(upper, high_nibbles(q));
  }
}

// The weights of the lower nibbles of 16 bytes, then those of the upper.
template <class Sink>
inline void put_nibble_halves(Sink& sink, int i, Table table, const std::uint8_t* p) {
  Vector low, high;
  look_up_nibbles(table, table, p, &low, &high);
  sink.put(i, low);
  sink.put(i + 1, high);
}

// a * b + c, for scales and codes: their products are exact, so that one rounding and two are the same.
inline Vector multiply_add(Vector a, Vector b, Vector c) {
  EXPERTILE_UNROLL
  for (int i = 0; i < Simd::kParts; ++i) c.part[i] = Simd::fused(a.part[i], b.part[i], c.part[i]);
  return c;
}

// The codes of a block of 256 weights, one a byte, made 32 at a time.
struct Codes {
  alignas(64) std::uint8_t code[256];
  void put(int i, Wide codes) { Simd::store_wide(code + 32 * i, codes); }
  void done() { Simd::in_memory(code); }
  Bytes operator[](int i) const { return Simd::load_bytes(code + 16 * i); }
};

struct F16 {
  static constexpr std::size_t elements = 1, bytes = 2;
  static Vector load(const std::uint8_t* p) { return Simd::load_half(p); }
};
struct BF16 {
  static constexpr std::size_t elements = 1, bytes = 2;
  static Vector load(const std::uint8_t* p) { return Simd::round_half(Simd::load_bf16(p)); }
};
struct F32 {
  static constexpr std::size_t elements = 1, bytes = 4;
  static Vector load(const std::uint8_t* p) { return Simd::round_half(Simd::load(reinterpret_cast<const float*>(p))); }
};

struct Q4_0 {
  static constexpr std::size_t elements = 32, bytes = 18;
  template <class Sink>
  static void decode(const std::uint8_t* p, Sink& sink) {
    put_nibble_halves(sink, 0, half_scaled_table(kCountMinus8, p), p + 2);
  }
};

struct IQ4_NL {
  static constexpr std::size_t elements = 32, bytes = 18;
  template <class Sink>
  static void decode(const std::uint8_t* p, Sink& sink) {
    put_nibble_halves(sink, 0, half_scaled_table(kIq4Levels, p), p + 2);
  }
};

struct IQ4_XS {
  static constexpr std::size_t elements = 256, bytes = 136;
  template <class Sink>
  static void decode(const std::uint8_t* p, Sink& sink) {
    alignas(32) float scale[8];
    Simd::six_bit_scales(Simd::half_at(p), load_u32(p + 4), load_u16(p + 2), scale);
    Simd::in_memory(scale);
    EXPERTILE_UNROLL
    for (int i = 0; i < 8; ++i) put_nibble_halves(sink, 2 * i, scaled_table(kIq4Levels, scale[i]), p + 8 + 16 * i);
  }
};

struct Q2_0 {
  static constexpr std::size_t elements = 64, bytes = 18;
  template <class Sink>
  static void decode(const std::uint8_t* p, Sink& sink) {
    const Table table = half_scaled_table(kQ2Levels, p);
    const Bytes q = Simd::load_bytes(p + 2);
    const Bytes low = low_nibbles(q);
    const Bytes high = high_nibbles(q);
    put_nibbles(sink, 0, table, Simd::zip_low(low, high));
    put_nibbles(sink, 2, table, Simd::zip_high(low, high));
  }
  // Each nibble holds two weights. The table repeats its four values, so that the bits above a code do no harm.
  template <class Sink>
  static void put_nibbles(Sink& sink, int i, Table table, Bytes nibbles) {
    const Bytes second = Simd::shift_right(nibbles, 2);
    sink.put(i, Simd::look_up(table, Simd::zip_low(nibbles, second)));
    sink.put(i + 1, Simd::look_up(table, Simd::zip_high(nibbles, second)));
  }
};

struct Q8_0 {
  static constexpr std::size_t elements = 32, bytes = 34;
  template <class Sink>
  static void decode(const std::uint8_t* p, Sink& sink) {
    const Vector d = Simd::all(Simd::half_at(p));
    for (int i = 0; i < 2; ++i) {
      const Vector q = Simd::from_signed(Simd::load_bytes(p + 2 + 16 * i));
      sink.put(i, Simd::round_half(Simd::multiply(q, d)));
    }
  }
};

struct Q5_0 {
  static constexpr std::size_t elements = 32, bytes = 22;
  template <class Sink>
  static void decode(const std::uint8_t* p, Sink& sink) {
    const Vector d = Simd::all(Simd::half_at(p));
    const std::uint32_t high = load_u32(p + 2);
    const Bytes q = Simd::load_bytes(p + 6);
    for (int i = 0; i < 2; ++i) {
      const Bytes low = i == 0 ? low_nibbles(q) : high_nibbles(q);
      const Bytes code = Simd::bit_or(low, Simd::spread_bits((high >> (16 * i)) & 0xffff, 16));
      const Vector value = Simd::from_signed(Simd::minus(code, Simd::every(16)));
      sink.put(i, Simd::round_half(Simd::multiply(value, d)));
    }
  }
};

struct Q5_1 {
  static constexpr std::size_t elements = 32, bytes = 24;
  template <class Sink>
  static void decode(const std::uint8_t* p, Sink& sink) {
    const Vector d = Simd::all(Simd::half_at(p));
    const Vector m = Simd::all(Simd::half_at(p + 2));
    const std::uint32_t high = load_u32(p + 4);
    const Bytes q = Simd::load_bytes(p + 8);
    for (int i = 0; i < 2; ++i) {
      const Bytes low = i == 0 ? low_nibbles(q) : high_nibbles(q);
      const Bytes code = Simd::bit_or(low, Simd::spread_bits((high >> (16 * i)) & 0xffff, 16));
      sink.put(i, Simd::round_half(multiply_add(Simd::from_signed(code), d, m)));
    }
  }
};

struct Q2_K {
  static constexpr std::size_t elements = 256, bytes = 84;
  template <class Sink>
  static void decode(const std::uint8_t* p, Sink& sink) {
    const Bytes packed = Simd::load_bytes(p);
    alignas(64) float scale[16];
    alignas(64) float least[16];
    Simd::store(scale, Simd::multiply(Simd::all(Simd::half_at(p + 80)), Simd::from_signed(low_nibbles(packed))));
    Simd::store(least, Simd::multiply(Simd::all(Simd::half_at(p + 82)), Simd::from_signed(high_nibbles(packed))));
    Codes codes;
    EXPERTILE_UNROLL
    for (int i = 0; i < 8; ++i) {
      const Wide low = Simd::take_bits(Simd::load_wide(p + 16 + 32 * (i / 4)), 2 * (i % 4), 2, 0);
      codes.put(i, Simd::either(low, i % 2 == 0 ? Simd::halves(0, 4) : Simd::halves(8, 12)));
    }
    codes.done();
    for (int i = 0; i < 16; i += 4) {  // four times 16 weights, of four scales, in one table
      const Vector values = Simd::multiply(Simd::quads(scale + i), Simd::load(kCount4));
      const Table table = Simd::table(Simd::subtract(values, Simd::quads(least + i)));
      for (int j = i; j < i + 4; ++j) sink.put(j, Simd::look_up(table, codes[j]));
    }
  }
};

struct Q3_K {
  static constexpr std::size_t elements = 256, bytes = 110;
  // 16 scales of 6 bits in 12 bytes: low nibbles of 16 in the first 8, their high pairs in the last 4.
  static Bytes scales(const std::uint8_t* p) {
    const std::uint32_t a = load_u32(p), b = load_u32(p + 4), c = load_u32(p + 8);
    const std::uint32_t word[4] = {(a & 0x0f0f0f0fu) | ((c & 0x03030303u) << 4),
                                   (b & 0x0f0f0f0fu) | (((c >> 2) & 0x03030303u) << 4),
                                   ((a >> 4) & 0x0f0f0f0fu) | (((c >> 4) & 0x03030303u) << 4),
                                   ((b >> 4) & 0x0f0f0f0fu) | (((c >> 6) & 0x03030303u) << 4)};
    return Simd::minus(Simd::load_bytes(word), Simd::every(32));
  }
  template <class Sink>
  static void decode(const std::uint8_t* p, Sink& sink) {
    alignas(64) float scale[16];
    Simd::store(scale, Simd::multiply(Simd::all(Simd::half_at(p + 108)), Simd::from_signed(scales(p + 96))));
    const Wide high = Simd::load_wide(p);
    const Wide second = Simd::halves(0, 8);
    Codes codes;
    EXPERTILE_UNROLL
    for (int i = 0; i < 8; ++i) {
      const Wide low = Simd::take_bits(Simd::load_wide(p + 32 + 32 * (i / 4)), 2 * (i % 4), 2, 0);
      codes.put(i, Simd::either(Simd::either(low, Simd::take_bits(high, i, 1, 2)), second));
    }
    codes.done();
    for (int i = 0; i < 8; ++i) {  // twice 16 weights, of two scales, in one table
      const Table table = Simd::table(Simd::multiply(Simd::pairs(scale + 2 * i), Simd::load(kQ3Levels)));
      sink.put(2 * i, Simd::look_up(table, codes[2 * i]));
      sink.put(2 * i + 1, Simd::look_up(table, codes[2 * i + 1]));
    }
  }
};

// The 8 pairs (scale, least) of Q4_K and Q5_K, 6 bits each in 12 bytes.
inline void k_scales(const std::uint8_t* p, float* scale, float* minus_least) {
  const std::uint32_t a = load_u32(p + 4), b = load_u32(p + 8), c = load_u32(p + 12);
  const std::uint32_t word[4] = {a & 0x3f3f3f3fu, (c & 0x0f0f0f0fu) | (((a >> 6) & 0x03030303u) << 4), b & 0x3f3f3f3fu,
                                 ((c >> 4) & 0x0f0f0f0fu) | (((b >> 6) & 0x03030303u) << 4)};
  const float factors[2] = {Simd::half_at(p), -Simd::half_at(p + 2)};
  alignas(64) float both[16];
  Simd::store(both, Simd::multiply(Simd::pairs(factors), Simd::from_signed(Simd::load_bytes(word))));
  std::memcpy(scale, both, 32);
  std::memcpy(minus_least, both + 8, 32);
}

struct Q4_K {
  static constexpr std::size_t elements = 256, bytes = 144;
  template <class Sink>
  static void decode(const std::uint8_t* p, Sink& sink) {
    float scale[8], minus_least[8];
    k_scales(p, scale, minus_least);
    const auto table = [&](int i) {
      return Simd::table(multiply_add(Simd::all(scale[i]), Simd::load(kCount), Simd::all(minus_least[i])));
    };
    for (int i = 0; i < 8; i += 2) {
      const Table lower = table(i), upper = table(i + 1);
      Vector low[2], high[2];
      for (int half = 0; half < 2; ++half) {
        look_up_nibbles(lower, upper, p + 16 + 16 * (i + half), low + half, high + half);
      }
      for (int half = 0; half < 2; ++half) sink.put(2 * i + half, low[half]);
      for (int half = 0; half < 2; ++half) sink.put(2 * i + 2 + half, high[half]);
    }
  }
};

struct Q5_K {
  static constexpr std::size_t elements = 256, bytes = 176;
  template <class Sink, class S = Simd>
  static void decode(const std::uint8_t* p, Sink& sink) {
    float scale[8], minus_least[8];
    k_scales(p, scale, minus_least);
    Codes codes;
    if constexpr (S::kSignMasks) {
      S::join_five_bits(p + 48, p + 16, codes.code);
    } else {
      const Wide high = S::load_wide(p + 16);
      EXPERTILE_UNROLL
      for (int i = 0; i < 8; ++i) {
        const Wide low = S::take_bits(S::load_wide(p + 48 + 32 * (i / 2)), 4 * (i % 2), 4, 0);
        codes.put(i, S::either(low, S::take_bits(high, i, 1, 4)));
      }
    }
    codes.done();
    EXPERTILE_UNROLL
    for (int i = 0; i < 16; ++i) {
      const Vector value =
          multiply_add(Simd::from_signed(codes[i]), Simd::all(scale[i / 2]), Simd::all(minus_least[i / 2]));
      sink.put(i, Simd::round_half(value));
    }
  }
};

struct Q6_K {
  static constexpr std::size_t elements = 256, bytes = 210;
  template <class Sink>
  static void decode(const std::uint8_t* p, Sink& sink) {
    alignas(64) float scale[16];
    Simd::store(scale, Simd::multiply(Simd::all(Simd::half_at(p + 208)), Simd::from_signed(Simd::load_bytes(p + 192))));
    Codes codes;
    EXPERTILE_UNROLL
    for (int i = 0; i < 8; ++i) {
      const int part = i / 4, quarter = i % 4;
      const Wide q = Simd::load_wide(p + 64 * part + 32 * (quarter % 2));
      const Wide high = Simd::take_bits(Simd::load_wide(p + 128 + 32 * part), 2 * quarter, 2, 4);
      codes.put(i, Simd::less(Simd::either(Simd::take_bits(q, quarter < 2 ? 0 : 4, 4, 0), high), 32));
    }
    codes.done();
    for (int i = 0; i < 16; ++i) {
      sink.put(i, Simd::round_half(Simd::multiply(Simd::all(scale[i]), Simd::from_signed(codes[i]))));
    }
  }
};

}  // namespace
