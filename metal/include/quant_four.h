// quant_four.h: four neighbouring weights, for operands that are filled in fours.
//
// FourReader<Format>::read4(row, k, n, y): weights k .. k+3 of a row of n, k a multiple of 4, with the bits of read8;
// zeros behind the row's end.
#pragma once
#include <metal_stdlib>

#include "quant.h"

using namespace metal;

// Weights 4*i4 .. 4*i4+3 of a quant block: eight are decoded and four of them kept. The formats in which the product's
// model stores its experts follow with decoders of their own, which do half the work.
template <typename Format>
struct FourDecoder {
  static METAL_FUNC void decode4(const device uchar* block, uint i4, thread float* y) {
    float eight[8];
    Format::decode8(block, i4 / 2, eight);
    for (uint j = 0; j < 4; ++j) {
      y[j] = i4 % 2 == 0 ? eight[j] : eight[j + 4];
    }
  }
};

template <>
struct FourDecoder<Q8_0> {
  static METAL_FUNC void decode4(const device uchar* block, uint i4, thread float* y) {
    const float d = load_half(block);
    const uint codes = load32(block + 2 + 4 * i4) ^ 0x80808080u;
    for (uint j = 0; j < 4; ++j) {
      y[j] = d * float(int(byte_of(codes, j)) - 128);
    }
  }
};

template <>
struct FourDecoder<Q2_0> {
  static METAL_FUNC void decode4(const device uchar* block, uint i4, thread float* y) {
    const float d = load_half(block);
    const uint codes = block[2 + i4];
    for (uint j = 0; j < 4; ++j) {
      y[j] = d * float(int((codes >> (2 * j)) & 3u) - 1);
    }
  }
};

template <>
struct FourDecoder<IQ4_NL> {
  static METAL_FUNC void decode4(const device uchar* block, uint i4, thread float* y) {
    const float d = load_half(block);
    const uint codes = load32(block + 2 + 4 * (i4 & 3u)) >> (4 * (i4 >> 2));
    for (uint j = 0; j < 4; ++j) {
      y[j] = d * iq4_levels[(codes >> (8 * j)) & 15u];
    }
  }
};

template <>
struct FourDecoder<IQ2_XS> {
  static METAL_FUNC void decode4(const device uchar* block, uint i4, thread float* y) {
    const uint i8 = i4 >> 1;
    const uint upper = i4 & 1u;
    const uint q = load16(block + 2 + 2 * i8);
    const uint nibble = (uint(block[66 + (i8 >> 2)]) >> (4 * ((i8 >> 1) & 1u))) & 15u;
    const float scale = load_half(block) * (0.5f + float(nibble)) * 0.25f;
    const uint entry = iq2_xs_grid[q & 511u] >> (8 * upper);
    const uint signs = even_signs(q >> 9) >> (4 * upper);
    for (uint j = 0; j < 4; ++j) {
      const uint level = (0x2b1908u >> (8 * ((entry >> (2 * j)) & 3u))) & 255u;
      y[j] = with_sign(scale * float(level), signs, j);
    }
  }
};

template <typename Format, bool single = (Format::elements == 1)>
struct FourReader {
  static METAL_FUNC void read4(const device uchar* row, uint k, uint n, thread float* y) {
    if (k < n) {
      const device uchar* block = row + ulong(k / Format::elements) * Format::bytes;
      FourDecoder<Format>::decode4(block, (k % Format::elements) / 4, y);
    } else {
      for (uint j = 0; j < 4; ++j) {
        y[j] = 0.0f;
      }
    }
  }
};

template <typename Format>
struct FourReader<Format, true> {
  static METAL_FUNC void read4(const device uchar* row, uint k, uint n, thread float* y) {
    for (uint j = 0; j < 4; ++j) {
      y[j] = k + j < n ? Format::decode1(row + ulong(k + j) * Format::bytes) : 0.0f;
    }
  }
};
