// simd_portable.h: 16 fp32 lanes in plain C++, for machines without one of the instruction sets, and as the yardstick
// of their bits.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "host/half.h"

namespace {

struct Simd {
  static constexpr int kParts = 4;
  static constexpr int kWidth = 4;
  static constexpr int kDirectWeights = 1;
  struct Part {
    float lane[4];
  };
  struct Vector {
    Part part[4];
  };

  template <class Step>
  static Part each(Part a, Part b, const Step& step) {
    Part to;
    for (int i = 0; i < 4; ++i) to.lane[i] = step(a.lane[i], b.lane[i]);
    return to;
  }
  template <class Step>
  static Vector each(const Vector& a, const Vector& b, const Step& step) {
    Vector to;
    for (int p = 0; p < 4; ++p) to.part[p] = each(a.part[p], b.part[p], step);
    return to;
  }

  static Part load_part(const float* p) {
    Part v;
    std::memcpy(v.lane, p, 16);
    return v;
  }
  static void store_part(float* p, Part v) { std::memcpy(p, v.lane, 16); }
  static void keep(Part&) {}
  static Part zero_part() { return {{0, 0, 0, 0}}; }
  static Part separate(Part a, Part b, Part sum) {
    for (int i = 0; i < 4; ++i) sum.lane[i] = sum.lane[i] + a.lane[i] * b.lane[i];
    return sum;
  }
  // The products of halves are exact: nothing to fuse.
  static Part fused(Part a, Part b, Part sum) { return separate(a, b, sum); }

  static Vector load(const float* p) {
    Vector v;
    std::memcpy(&v, p, 64);
    return v;
  }
  static void store(float* p, const Vector& v) { std::memcpy(p, &v, 64); }
  static Vector all(float x) {
    const Part v{{x, x, x, x}};
    return {{v, v, v, v}};
  }
  static Vector add(const Vector& a, const Vector& b) {
    return each(a, b, [](float x, float y) { return x + y; });
  }
  static Vector subtract(const Vector& a, const Vector& b) {
    return each(a, b, [](float x, float y) { return x - y; });
  }
  static Vector multiply(const Vector& a, const Vector& b) {
    return each(a, b, [](float x, float y) { return x * y; });
  }
  static Vector divide(const Vector& a, const Vector& b) {
    return each(a, b, [](float x, float y) { return x / y; });
  }
  // NaN stays NaN.
  static Vector clamp(const Vector& v, float low, float high) {
    return each(v, v, [&](float x, float) { return x < low ? low : x > high ? high : x; });
  }
  // 2^(v / 2) rounded down and what is left of 2^v, for whole v of -252..252.
  static void powers_of_two(const Vector& v, Vector* half, Vector* rest) {
    const auto power = [](int exponent) {
      const std::uint32_t bits = static_cast<std::uint32_t>(exponent + 127) << 23;
      float value;
      std::memcpy(&value, &bits, 4);
      return value;
    };
    for (int i = 0; i < 16; ++i) {
      const float lane = v.part[i / 4].lane[i % 4];
      const int whole = lane == lane ? static_cast<int>(lane) : 0;
      const int first = whole >= 0 ? whole / 2 : -((1 - whole) / 2);
      half->part[i / 4].lane[i % 4] = power(first);
      rest->part[i / 4].lane[i % 4] = power(whole - first);
    }
  }
  static Vector round_half(const Vector& v) {
    return each(
        v, v, [](float x, float) { return expertile::msl::half_bits_to_float(expertile::msl::float_to_half_bits(x)); });
  }
  // To bf16 and back, to nearest even. NaN passes.
  static Vector round_bf16(const Vector& v) {
    return each(v, v, [](float x, float) {
      std::uint32_t bits;
      std::memcpy(&bits, &x, 4);
      if (x == x) bits += 0x7fff + ((bits >> 16) & 1);
      bits &= 0xffff0000u;
      std::memcpy(&x, &bits, 4);
      return x;
    });
  }
  static Vector load_half(const std::uint8_t* p) {
    std::uint16_t bits[16];
    std::memcpy(bits, p, 32);
    Vector v;
    for (int i = 0; i < 16; ++i) v.part[i / 4].lane[i % 4] = expertile::msl::half_bits_to_float(bits[i]);
    return v;
  }
  static void store_half(std::uint16_t* p, const Vector& v) {
    for (int i = 0; i < 16; ++i) p[i] = expertile::msl::float_to_half_bits(v.part[i / 4].lane[i % 4]);
  }
  // Halves saturate at +-65504, NaN passes; adds to `count` how many did.
  static Vector saturate(const Vector& v, std::uint64_t& count) {
    return each(v, v, [&](float x, float) {
      if (!(std::fabs(x) > 65504.0f)) return x;
      ++count;
      return std::copysign(65504.0f, x);
    });
  }

  static float sum(const Vector& v) {
    const auto plus = [](float x, float y) { return x + y; };
    const Part t = each(each(v.part[0], v.part[2], plus), each(v.part[1], v.part[3], plus), plus);
    return (t.lane[0] + t.lane[2]) + (t.lane[1] + t.lane[3]);
  }
  static void sum4(const Vector* v, float* out) {
    for (int i = 0; i < 4; ++i) out[i] = sum(v[i]);
  }
};

}  // namespace
