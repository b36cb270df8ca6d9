// simd_neon.h: 16 fp32 lanes and 16 bytes on 64-bit ARM's baseline.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace {

struct Simd {
  static constexpr int kParts = 4;
  static constexpr int kWidth = 4;
  static constexpr int kDirectWeights = 1;
  static constexpr bool kSignMasks = false;
  static constexpr bool kHalfProducts = false;
  using Part = float32x4_t;
  struct Vector {
    float32x4_t part[4];
  };
  using Bytes = uint8x16_t;
  struct Wide {
    Bytes half[2];
  };
  // 16 halves, split into their low and their high bytes: two byte look-ups give 16 of them.
  struct Table {
    uint8x16_t low, high;
  };

  static Part load_part(const float* p) { return vld1q_f32(p); }
  static void store_part(float* p, Part v) { vst1q_f32(p, v); }
  // A register from here on: else the compiler loads anew for every use.
  static void keep(Part& v) { asm("" : "+w"(v)); }
  static Part zero_part() { return vdupq_n_f32(0.0f); }
  static Part fused(Part a, Part b, Part sum) { return vfmaq_f32(sum, a, b); }
  static Part separate(Part a, Part b, Part sum) { return vaddq_f32(sum, vmulq_f32(a, b)); }

  static Vector load(const float* p) { return {{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}}; }
  static void store(float* p, Vector v) {
    for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, v.part[i]);
  }
  static Vector all(float x) {
    const float32x4_t v = vdupq_n_f32(x);
    return {{v, v, v, v}};
  }
  // 8 lanes of p[0], 8 of p[1]; then 4 lanes of each of p[0..3].
  static Vector pairs(const float* p) {
    const float32x4_t a = vdupq_n_f32(p[0]);
    const float32x4_t b = vdupq_n_f32(p[1]);
    return {{a, a, b, b}};
  }
  static Vector quads(const float* p) {
    return {{vdupq_n_f32(p[0]), vdupq_n_f32(p[1]), vdupq_n_f32(p[2]), vdupq_n_f32(p[3])}};
  }
  static Vector add(Vector a, Vector b) {
    for (int i = 0; i < 4; ++i) a.part[i] = vaddq_f32(a.part[i], b.part[i]);
    return a;
  }
  static Vector subtract(Vector a, Vector b) {
    for (int i = 0; i < 4; ++i) a.part[i] = vsubq_f32(a.part[i], b.part[i]);
    return a;
  }
  static Vector multiply(Vector a, Vector b) {
    for (int i = 0; i < 4; ++i) a.part[i] = vmulq_f32(a.part[i], b.part[i]);
    return a;
  }
  static Vector divide(Vector a, Vector b) {
    for (int i = 0; i < 4; ++i) a.part[i] = vdivq_f32(a.part[i], b.part[i]);
    return a;
  }
  // NaN stays NaN.
  static Vector clamp(Vector v, float low, float high) {
    for (float32x4_t& part : v.part) part = vmaxq_f32(vdupq_n_f32(low), vminq_f32(vdupq_n_f32(high), part));
    return v;
  }
  // 2^(v / 2) rounded down and what is left of 2^v, for whole v of -252..252.
  static void powers_of_two(Vector v, Vector* half, Vector* rest) {
    for (int i = 0; i < 4; ++i) {
      const int32x4_t whole = vcvtq_s32_f32(v.part[i]);
      const int32x4_t first = vshrq_n_s32(whole, 1);
      const int32x4_t second = vsubq_s32(whole, first);
      const int32x4_t bias = vdupq_n_s32(127);
      half->part[i] = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(first, bias), 23));
      rest->part[i] = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(second, bias), 23));
    }
  }
  static Vector round_half(Vector v) {
    for (float32x4_t& part : v.part) part = vcvt_f32_f16(vcvt_f16_f32(part));
    return v;
  }
  // To bf16 and back, to nearest even. NaN passes.
  static Vector round_bf16(Vector v) {
    for (float32x4_t& part : v.part) {
      const uint32x4_t bits = vreinterpretq_u32_f32(part);
      const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
      const uint32x4_t up = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
      const uint32x4_t rounded = vbslq_u32(vceqq_f32(part, part), up, bits);
      part = vreinterpretq_f32_u32(vandq_u32(rounded, vdupq_n_u32(0xffff0000u)));
    }
    return v;
  }
  static Vector from_halves(uint16x8_t low, uint16x8_t high) {
    const float16x8_t a = vreinterpretq_f16_u16(low);
    const float16x8_t b = vreinterpretq_f16_u16(high);
    return {{vcvt_f32_f16(vget_low_f16(a)), vcvt_f32_f16(vget_high_f16(a)), vcvt_f32_f16(vget_low_f16(b)),
             vcvt_f32_f16(vget_high_f16(b))}};
  }
  static float half_at(const std::uint8_t* p) {
    std::uint16_t bits;
    std::memcpy(&bits, p, 2);
    return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(bits))), 0);
  }
  static Vector load_half(const std::uint8_t* p) {
    return from_halves(vreinterpretq_u16_u8(vld1q_u8(p)), vreinterpretq_u16_u8(vld1q_u8(p + 16)));
  }
  static Vector load_bf16(const std::uint8_t* p) {
    Vector v;
    for (int i = 0; i < 4; ++i) {
      v.part[i] = vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p + 8 * i)), 16));
    }
    return v;
  }
  static Vector from_signed(Bytes b) {
    const int8x16_t s = vreinterpretq_s8_u8(b);
    const int16x8_t low = vmovl_s8(vget_low_s8(s));
    const int16x8_t high = vmovl_s8(vget_high_s8(s));
    return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))),
             vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)))}};
  }
  static void store_half(std::uint16_t* p, Vector v) {
    for (int i = 0; i < 4; ++i) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(v.part[i])));
  }
  // Halves saturate at +-65504, NaN passes; adds to `count` how many did.
  static Vector saturate(Vector v, std::uint64_t& count) {
    const float32x4_t most = vdupq_n_f32(65504.0f);
    const uint32x4_t sign = vdupq_n_u32(0x80000000u);
    for (float32x4_t& part : v.part) {
      const uint32x4_t over = vcgtq_f32(vabsq_f32(part), most);
      count += vaddvq_u32(vshrq_n_u32(over, 31));
      part = vbslq_f32(over, vbslq_f32(sign, part, most), part);
    }
    return v;
  }

  static Table table(Vector values) {
    const uint8x16_t a = vreinterpretq_u8_f16(vcombine_f16(vcvt_f16_f32(values.part[0]), vcvt_f16_f32(values.part[1])));
    const uint8x16_t b = vreinterpretq_u8_f16(vcombine_f16(vcvt_f16_f32(values.part[2]), vcvt_f16_f32(values.part[3])));
    return {vuzp1q_u8(a, b), vuzp2q_u8(a, b)};
  }
  static Vector look_up(Table t, Bytes codes) {
    const uint8x16_t low = vqtbl1q_u8(t.low, codes);
    const uint8x16_t high = vqtbl1q_u8(t.high, codes);
    return from_halves(vreinterpretq_u16_u8(vzip1q_u8(low, high)), vreinterpretq_u16_u8(vzip2q_u8(low, high)));
  }

  static Bytes load_bytes(const void* p) { return vld1q_u8(static_cast<const std::uint8_t*>(p)); }
  static Bytes load_two(const void* p, const void* q) {
    return vcombine_u8(vld1_u8(static_cast<const std::uint8_t*>(p)), vld1_u8(static_cast<const std::uint8_t*>(q)));
  }
  static Bytes load_four(const void* p, const void* q, const void* r, const void* s) {
    std::uint32_t word[4];
    std::memcpy(&word[0], p, 4);
    std::memcpy(&word[1], q, 4);
    std::memcpy(&word[2], r, 4);
    std::memcpy(&word[3], s, 4);
    return vreinterpretq_u8_u32(vld1q_u32(word));
  }
  static Bytes every(std::uint8_t x) { return vdupq_n_u8(x); }
  static Bytes bit_and(Bytes a, Bytes b) { return vandq_u8(a, b); }
  static Bytes bit_or(Bytes a, Bytes b) { return vorrq_u8(a, b); }
  static Bytes minus(Bytes a, Bytes b) { return vsubq_u8(a, b); }
  static Bytes shift_right(Bytes a, int n) { return vshlq_u8(a, vdupq_n_s8(static_cast<std::int8_t>(-n))); }
  static Bytes zip_low(Bytes a, Bytes b) { return vzip1q_u8(a, b); }
  static Bytes zip_high(Bytes a, Bytes b) { return vzip2q_u8(a, b); }
  // Byte i is `value` where bit i of `bits` is set, else 0.
  static Bytes spread_bits(std::uint32_t bits, std::uint8_t value) {
    const uint8x16_t bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201ull));
    const uint8x8_t low = vdup_n_u8(static_cast<std::uint8_t>(bits));
    const uint8x8_t high = vdup_n_u8(static_cast<std::uint8_t>(bits >> 8));
    return vandq_u8(vtstq_u8(vcombine_u8(low, high), bit), vdupq_n_u8(value));
  }

  static Wide load_wide(const std::uint8_t* p) { return {{vld1q_u8(p), vld1q_u8(p + 16)}}; }
  static void store_wide(std::uint8_t* p, Wide a) {
    vst1q_u8(p, a.half[0]);
    vst1q_u8(p + 16, a.half[1]);
  }
  // `low` 16 times, then `high`.
  static Wide halves(std::uint8_t low, std::uint8_t high) { return {{every(low), every(high)}}; }
  static Wide either(Wide a, Wide b) { return {{bit_or(a.half[0], b.half[0]), bit_or(a.half[1], b.half[1])}}; }
  static Wide less(Wide a, std::uint8_t b) { return {{minus(a.half[0], every(b)), minus(a.half[1], every(b))}}; }
  // Bits from .. from+count-1 of every byte, as its bits to .. to+count-1.
  static Wide take_bits(Wide a, int from, int count, int to) {
    const int8x16_t left = vdupq_n_s8(static_cast<std::int8_t>(to - from));
    const Bytes mask = every(static_cast<std::uint8_t>(((1 << count) - 1) << to));
    return {{bit_and(vshlq_u8(a.half[0], left), mask), bit_and(vshlq_u8(a.half[1], left), mask)}};
  }

  // d times 8 numbers of 6 bits less 32; in ascending places of 4 bits their lower parts, of 2 bits their upper.
  static void six_bit_scales(float d, std::uint32_t lower, std::uint32_t upper, float* scale) {
    for (int i = 0; i < 8; ++i) {
      const std::uint32_t number = ((lower >> (4 * i)) & 15) | (((upper >> (2 * i)) & 3) << 4);
      scale[i] = d * static_cast<float>(static_cast<int>(number) - 32);
    }
  }

  // Memory from here on.
  template <class T, std::size_t N>
  static void in_memory(T (&array)[N]) {
    asm("" : "+m"(array));
  }

  // 32 words of 16 bits: the lower 9 bits, the upper 7.
  static void split_words(const void* p, std::uint16_t* lower, std::uint16_t* upper) {
    for (int i = 0; i < 4; ++i) {
      const uint16x8_t words = vreinterpretq_u16_u8(vld1q_u8(static_cast<const std::uint8_t*>(p) + 16 * i));
      vst1q_u16(lower + 8 * i, vandq_u16(words, vdupq_n_u16(511)));
      vst1q_u16(upper + 8 * i, vshrq_n_u16(words, 9));
    }
  }

  static float sum(Vector v) {
    const float32x4_t t = vaddq_f32(vaddq_f32(v.part[0], v.part[2]), vaddq_f32(v.part[1], v.part[3]));
    const float32x2_t u = vadd_f32(vget_low_f32(t), vget_high_f32(t));
    return vget_lane_f32(u, 0) + vget_lane_f32(u, 1);
  }
  static void sum4(const Vector* v, float* out) {
    for (int i = 0; i < 4; ++i) out[i] = sum(v[i]);
  }
};

}  // namespace
