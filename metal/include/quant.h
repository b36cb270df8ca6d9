// quant.h: the decoders of the GGUF weight types.
//
// struct X { elements, bytes; decode8(block, i8, y) }: a quant block of X is `elements` weights in `bytes` bytes;
// decode8 writes its weights 8*i8 .. 8*i8+7 to y, in fp32, operation for operation as the `gguf` package decodes them.
// F32, F16 and BF16 have blocks of one weight; their decode8 reads 8 neighbouring ones, and decode1 a single one.
// Every block has an even size and lies at an even address, no more: two bytes are loaded at a time.
// read8 and read1 find the block by an index into a row of weights.
#pragma once
#include <metal_stdlib>

#include "quant_tables.h"

using namespace metal;

METAL_FUNC uint load16(const device uchar* p) { return *reinterpret_cast<const device ushort*>(p); }
METAL_FUNC uint load32(const device uchar* p) { return load16(p) | (load16(p + 2) << 16); }
METAL_FUNC float load_half(const device uchar* p) {
  return float(as_type<half>(*reinterpret_cast<const device ushort*>(p)));
}
METAL_FUNC uint byte_of(uint word, uint j) { return (word >> (8 * j)) & 255u; }
METAL_FUNC int signed_byte(uint byte) { return int(byte ^ 128u) - 128; }

// y[j] = scale * (code j - offset), codes in the bytes of two words.
METAL_FUNC void scale8(float scale, uint low, uint high, int offset, thread float* y) {
  for (uint j = 0; j < 4; ++j) {
    y[j] = scale * float(int(byte_of(low, j)) - offset);
    y[j + 4] = scale * float(int(byte_of(high, j)) - offset);
  }
}

// y[j] = scale * code j + shift.
METAL_FUNC void scale_shift8(float scale, float shift, uint low, uint high, thread float* y) {
  for (uint j = 0; j < 4; ++j) {
    y[j] = scale * float(byte_of(low, j)) + shift;
    y[j + 4] = scale * float(byte_of(high, j)) + shift;
  }
}

// The four bits from `bits` on, each in the lowest bit of a byte.
METAL_FUNC uint spread4(uint bits) {
  return (bits & 1u) | ((bits & 2u) << 7) | ((bits & 4u) << 14) | ((bits & 8u) << 21);
}

struct F32 {
  static constant constexpr uint elements = 1, bytes = 4;
  static METAL_FUNC float decode1(const device uchar* p) { return *reinterpret_cast<const device float*>(p); }
  static METAL_FUNC void decode8(const device uchar* block, uint i8, thread float* y) {
    for (uint j = 0; j < 8; ++j) {
      y[j] = decode1(block + 32 * i8 + 4 * j);
    }
  }
};

struct F16 {
  static constant constexpr uint elements = 1, bytes = 2;
  static METAL_FUNC float decode1(const device uchar* p) { return load_half(p); }
  static METAL_FUNC void decode8(const device uchar* block, uint i8, thread float* y) {
    for (uint j = 0; j < 8; ++j) {
      y[j] = decode1(block + 16 * i8 + 2 * j);
    }
  }
};

struct BF16 {
  static constant constexpr uint elements = 1, bytes = 2;
  static METAL_FUNC float decode1(const device uchar* p) { return as_type<float>(load16(p) << 16); }
  static METAL_FUNC void decode8(const device uchar* block, uint i8, thread float* y) {
    for (uint j = 0; j < 8; ++j) {
      y[j] = decode1(block + 16 * i8 + 2 * j);
    }
  }
};

// d; qs[16]: weight j in the low nibble of qs[j], weight j + 16 in the high one.
struct Q4_0 {
  static constant constexpr uint elements = 32, bytes = 18;
  static METAL_FUNC void decode8(const device uchar* block, uint i8, thread float* y) {
    const device uchar* qs = block + 2 + 8 * (i8 & 1u);
    const uint shift = 4 * (i8 >> 1);
    scale8(load_half(block), (load32(qs) >> shift) & 0x0f0f0f0fu, (load32(qs + 4) >> shift) & 0x0f0f0f0fu, 8, y);
  }
};

// d; qh[4]; qs[16]: as Q4_0, with a fifth bit.
struct Q5_0 {
  static constant constexpr uint elements = 32, bytes = 22;
  static METAL_FUNC void decode8(const device uchar* block, uint i8, thread float* y) {
    const device uchar* qs = block + 6 + 8 * (i8 & 1u);
    const uint shift = 4 * (i8 >> 1);
    const uint qh = load32(block + 2) >> (8 * i8);
    scale8(load_half(block), ((load32(qs) >> shift) & 0x0f0f0f0fu) | (spread4(qh) << 4),
           ((load32(qs + 4) >> shift) & 0x0f0f0f0fu) | (spread4(qh >> 4) << 4), 16, y);
  }
};

// d; m; qh[4]; qs[16].
struct Q5_1 {
  static constant constexpr uint elements = 32, bytes = 24;
  static METAL_FUNC void decode8(const device uchar* block, uint i8, thread float* y) {
    const device uchar* qs = block + 8 + 8 * (i8 & 1u);
    const uint shift = 4 * (i8 >> 1);
    const uint qh = load32(block + 4) >> (8 * i8);
    scale_shift8(load_half(block), load_half(block + 2), ((load32(qs) >> shift) & 0x0f0f0f0fu) | (spread4(qh) << 4),
                 ((load32(qs + 4) >> shift) & 0x0f0f0f0fu) | (spread4(qh >> 4) << 4), y);
  }
};

// d; int8 qs[32].
struct Q8_0 {
  static constant constexpr uint elements = 32, bytes = 34;
  static METAL_FUNC void decode8(const device uchar* block, uint i8, thread float* y) {
    const device uchar* qs = block + 2 + 8 * i8;
    scale8(load_half(block), load32(qs) ^ 0x80808080u, load32(qs + 4) ^ 0x80808080u, 128, y);
  }
};

// d; qs[16]: two bits a weight, less 1.
struct Q2_0 {
  static constant constexpr uint elements = 64, bytes = 18;
  static METAL_FUNC void decode8(const device uchar* block, uint i8, thread float* y) {
    const float d = load_half(block);
    const uint q = load16(block + 2 + 2 * i8);
    for (uint j = 0; j < 8; ++j) {
      y[j] = d * float(int((q >> (2 * j)) & 3u) - 1);
    }
  }
};

// scales[16]; qs[64]; d; dmin. Of each half of 128 weights, weight 32 * s + j has bits 2s, 2s + 1 of byte j.
struct Q2_K {
  static constant constexpr uint elements = 256, bytes = 84;
  static METAL_FUNC void decode8(const device uchar* block, uint i8, thread float* y) {
    const device uchar* qs = block + 16 + 32 * (i8 >> 4) + 8 * (i8 & 3u);
    const uint shift = 2 * ((i8 >> 2) & 3u);
    const uint scale = block[i8 >> 1];
    const float dl = load_half(block + 80) * float(scale & 15u);
    const float ml = load_half(block + 82) * float(scale >> 4);
    scale_shift8(dl, -ml, (load32(qs) >> shift) & 0x03030303u, (load32(qs + 4) >> shift) & 0x03030303u, y);
  }
};

// hmask[32]; qs[64]; scales[12]; d. Third bit in hmask: byte j, bit by 32 weights; where it is 0, 4 is taken away.
struct Q3_K {
  static constant constexpr uint elements = 256, bytes = 110;
  static METAL_FUNC void decode8(const device uchar* block, uint i8, thread float* y) {
    const device uchar* hmask = block + 8 * (i8 & 3u);
    const device uchar* qs = block + 32 + 32 * (i8 >> 4) + 8 * (i8 & 3u);
    const device uchar* scales = block + 96;
    const uint group = i8 >> 1;  // of 16 weights
    const uint shift = 2 * ((i8 >> 2) & 3u);
    const uint bit = i8 >> 2;
    const uint low = (uint(scales[group & 7u]) >> (4 * (group >> 3))) & 15u;
    const uint high = (uint(scales[8 + (group & 3u)]) >> (2 * (group >> 2))) & 3u;
    const float dl = load_half(block + 108) * float(int(low | (high << 4)) - 32);
    scale8(dl, ((load32(qs) >> shift) & 0x03030303u) | (((load32(hmask) >> bit) & 0x01010101u) << 2),
           ((load32(qs + 4) >> shift) & 0x03030303u) | (((load32(hmask + 4) >> bit) & 0x01010101u) << 2), 4, y);
  }
};

// Q4_K and Q5_K: the 6-bit scale (x) and minimum (y) of 32 weights, out of 12 bytes.
METAL_FUNC uint2 k_scale_min(const device uchar* scales, uint group) {
  const uint a = scales[group & 3u];
  const uint b = scales[4 + (group & 3u)];
  if (group < 4) {
    return uint2(a & 63u, b & 63u);
  }
  const uint low = scales[4 + group];
  return uint2((low & 15u) | ((a >> 2) & 48u), (low >> 4) | ((b >> 2) & 48u));
}

// d; dmin; scales[12]; qs[128]: of each 64 weights the first 32 in low nibbles.
struct Q4_K {
  static constant constexpr uint elements = 256, bytes = 144;
  static METAL_FUNC void decode8(const device uchar* block, uint i8, thread float* y) {
    const device uchar* qs = block + 16 + 32 * (i8 >> 3) + 8 * (i8 & 3u);
    const uint shift = 4 * ((i8 >> 2) & 1u);
    const uint2 scale = k_scale_min(block + 4, i8 >> 2);
    scale_shift8(load_half(block) * float(scale.x), -(load_half(block + 2) * float(scale.y)),
                 (load32(qs) >> shift) & 0x0f0f0f0fu, (load32(qs + 4) >> shift) & 0x0f0f0f0fu, y);
  }
};

// d; dmin; scales[12]; qh[32]; qs[128]: as Q4_K, with a fifth bit: byte j of qh, bit by 32 weights.
struct Q5_K {
  static constant constexpr uint elements = 256, bytes = 176;
  static METAL_FUNC void decode8(const device uchar* block, uint i8, thread float* y) {
    const device uchar* qh = block + 16 + 8 * (i8 & 3u);
    const device uchar* qs = block + 48 + 32 * (i8 >> 3) + 8 * (i8 & 3u);
    const uint shift = 4 * ((i8 >> 2) & 1u);
    const uint bit = i8 >> 2;
    const uint2 scale = k_scale_min(block + 4, i8 >> 2);
    scale_shift8(load_half(block) * float(scale.x), -(load_half(block + 2) * float(scale.y)),
                 ((load32(qs) >> shift) & 0x0f0f0f0fu) | (((load32(qh) >> bit) & 0x01010101u) << 4),
                 ((load32(qs + 4) >> shift) & 0x0f0f0f0fu) | (((load32(qh + 4) >> bit) & 0x01010101u) << 4), y);
  }
};

// ql[128]; qh[64]; int8 scales[16]; d. Of each half: 64 low nibbles, then 64 high ones; upper two bits by 32 weights.
struct Q6_K {
  static constant constexpr uint elements = 256, bytes = 210;
  static METAL_FUNC void decode8(const device uchar* block, uint i8, thread float* y) {
    const device uchar* ql = block + 64 * (i8 >> 4) + 8 * (i8 & 7u);
    const device uchar* qh = block + 128 + 32 * (i8 >> 4) + 8 * (i8 & 3u);
    const uint shift = 4 * ((i8 >> 3) & 1u);
    const uint bits = 2 * ((i8 >> 2) & 3u);
    const float dl = load_half(block + 208) * float(signed_byte(block[192 + (i8 >> 1)]));
    scale8(dl, ((load32(ql) >> shift) & 0x0f0f0f0fu) | (((load32(qh) >> bits) & 0x03030303u) << 4),
           ((load32(ql + 4) >> shift) & 0x0f0f0f0fu) | (((load32(qh + 4) >> bits) & 0x03030303u) << 4), 32, y);
  }
};

METAL_FUNC float with_sign(float value, uint signs, uint j) { return value * ((signs >> j) & 1u ? -1.0f : 1.0f); }

// The eighth sign makes their number even.
METAL_FUNC uint even_signs(uint seven) { return seven | ((popcount(seven) & 1u) << 7); }

// 8 weights from an IQ2 grid entry: codes 0, 1, 2 stand for 8, 25, 43.
METAL_FUNC void iq2_weights(float scale, uint entry, uint signs, thread float* y) {
  for (uint j = 0; j < 8; ++j) {
    const uint level = (0x2b1908u >> (8 * ((entry >> (2 * j)) & 3u))) & 255u;
    y[j] = with_sign(scale * float(level), signs, j);
  }
}

// d; 8 of { four grid indices of 8 bits, uint32 of four times 7 signs and the scale of 4 bits }.
struct IQ2_XXS {
  static constant constexpr uint elements = 256, bytes = 66;
  static METAL_FUNC void decode8(const device uchar* block, uint i8, thread float* y) {
    const device uchar* part = block + 2 + 8 * (i8 >> 2);
    const uint word = load32(part + 4);
    const float scale = load_half(block) * (0.5f + float(word >> 28)) * 0.25f;
    iq2_weights(scale, iq2_xxs_grid[part[i8 & 3u]], even_signs((word >> (7 * (i8 & 3u))) & 127u), y);
  }
};

// d; uint16 qs[32]: 9 bits of grid index and 7 signs; scales[8], a nibble for 16 weights.
struct IQ2_XS {
  static constant constexpr uint elements = 256, bytes = 74;
  static METAL_FUNC void decode8(const device uchar* block, uint i8, thread float* y) {
    const uint q = load16(block + 2 + 2 * i8);
    const uint nibble = (uint(block[66 + (i8 >> 2)]) >> (4 * ((i8 >> 1) & 1u))) & 15u;
    const float scale = load_half(block) * (0.5f + float(nibble)) * 0.25f;
    iq2_weights(scale, iq2_xs_grid[q & 511u], even_signs(q >> 9), y);
  }
};

// d; qs[32], signs[32]; qh[8]: two more bits of grid index for 8 weights; scales[8], a nibble for 16 weights.
struct IQ2_S {
  static constant constexpr uint elements = 256, bytes = 82;
  static METAL_FUNC void decode8(const device uchar* block, uint i8, thread float* y) {
    const uint high = (uint(block[66 + (i8 >> 2)]) >> (2 * (i8 & 3u))) & 3u;
    const uint nibble = (uint(block[74 + (i8 >> 2)]) >> (4 * ((i8 >> 1) & 1u))) & 15u;
    const float scale = load_half(block) * (0.5f + float(nibble)) * 0.25f;
    iq2_weights(scale, iq2_s_grid[uint(block[2 + i8]) | (high << 8)], block[34 + i8], y);
  }
};

// d; qs[64]: a grid index for 4 weights; 8 uint32 of four times 7 signs and the scale of 4 bits.
struct IQ3_XXS {
  static constant constexpr uint elements = 256, bytes = 98;
  static METAL_FUNC void decode8(const device uchar* block, uint i8, thread float* y) {
    const uint word = load32(block + 66 + 4 * (i8 >> 2));
    const uint q = load16(block + 2 + 2 * i8);
    const float scale = load_half(block) * (0.5f + float(word >> 28)) * 0.5f;
    const uint signs = even_signs((word >> (7 * (i8 & 3u))) & 127u);
    const uint entries = uint(iq3_xxs_grid[q & 255u]) | (uint(iq3_xxs_grid[q >> 8]) << 16);
    for (uint j = 0; j < 8; ++j) {
      const uint code = (entries >> (4 * j)) & 7u;  // levels 4, 12, 20, ... 52, and 62 as the last
      y[j] = with_sign(scale * float(8 * code + (code == 7 ? 6u : 4u)), signs, j);
    }
  }
};

// d; qs[64]; qh[8]: the ninth bit of each grid index; signs[32]; scales[4], a nibble for 32 weights.
struct IQ3_S {
  static constant constexpr uint elements = 256, bytes = 110;
  static METAL_FUNC void decode8(const device uchar* block, uint i8, thread float* y) {
    const uint q = load16(block + 2 + 2 * i8);
    const uint qh = uint(block[66 + (i8 >> 2)]) >> (2 * (i8 & 3u));
    const uint nibble = (uint(block[106 + (i8 >> 3)]) >> (4 * ((i8 >> 2) & 1u))) & 15u;
    const float scale = load_half(block) * float(1u + 2u * nibble);
    const uint first = iq3_s_grid[(q & 255u) | ((qh & 1u) << 8)];
    const uint second = iq3_s_grid[(q >> 8) | ((qh & 2u) << 7)];
    const uint entries = first | (second << 16);
    const uint signs = block[74 + i8];
    for (uint j = 0; j < 8; ++j) {
      y[j] = with_sign(scale * float(2 * ((entries >> (4 * j)) & 7u) + 1u), signs, j);
    }
  }
};

// y[j] = scale * level of nibble j; the nibbles are at `shift` in 8 bytes.
METAL_FUNC void iq4_weights(float scale, const device uchar* qs, uint shift, thread float* y) {
  const uint low = load32(qs) >> shift;
  const uint high = load32(qs + 4) >> shift;
  for (uint j = 0; j < 4; ++j) {
    y[j] = scale * iq4_levels[(low >> (8 * j)) & 15u];
    y[j + 4] = scale * iq4_levels[(high >> (8 * j)) & 15u];
  }
}

// d; qs[16], as Q4_0.
struct IQ4_NL {
  static constant constexpr uint elements = 32, bytes = 18;
  static METAL_FUNC void decode8(const device uchar* block, uint i8, thread float* y) {
    iq4_weights(load_half(block), block + 2 + 8 * (i8 & 1u), 4 * (i8 >> 1), y);
  }
};

// d; uint16 scales_h; scales_l[4]; qs[128]: 8 blocks of 32, each as IQ4_NL with a 6-bit scale less 32.
struct IQ4_XS {
  static constant constexpr uint elements = 256, bytes = 136;
  static METAL_FUNC void decode8(const device uchar* block, uint i8, thread float* y) {
    const uint group = i8 >> 2;
    const uint low = (uint(block[4 + (group >> 1)]) >> (4 * (group & 1u))) & 15u;
    const uint high = (load16(block + 2) >> (2 * group)) & 3u;
    const float scale = load_half(block) * float(int(low | (high << 4)) - 32);
    iq4_weights(scale, block + 8 + 16 * group + 8 * (i8 & 1u), 4 * ((i8 >> 1) & 1u), y);
  }
};

// Weights k .. k+7 of a row of n, k a multiple of 8; behind the row's end come zeros. A quantized row ends with a quant
// block, so that only rows of single weights need the end looked at.
template <typename Format, bool single = (Format::elements == 1)>
struct RowReader {
  static METAL_FUNC void read8(const device uchar* row, uint k, uint n, thread float* y) {
    if (k < n) {
      Format::decode8(row + ulong(k / Format::elements) * Format::bytes, (k % Format::elements) / 8, y);
    } else {
      for (uint j = 0; j < 8; ++j) {
        y[j] = 0.0f;
      }
    }
  }
};

template <typename Format>
struct RowReader<Format, true> {
  static METAL_FUNC void read8(const device uchar* row, uint k, uint n, thread float* y) {
    if (k + 8 <= n) {
      Format::decode8(row, k / 8, y);
    } else {
      for (uint j = 0; j < 8; ++j) {
        y[j] = k + j < n ? Format::decode1(row + ulong(k + j) * Format::bytes) : 0.0f;
      }
    }
  }
};
