// The grids as codes: each entry is decoded once, from a block whose scale is 1 and whose signs are all plus.
#include <algorithm>
#include <mutex>

#include "devices/cpu/kernels.h"
#include "quant.lowered.h"

namespace expertile::cpu {

GridCodes grid_codes;

namespace {

constexpr float kIq2Levels[3] = {8, 25, 43};
constexpr float kIq3XxsLevels[8] = {4, 12, 20, 28, 36, 44, 52, 62};
constexpr float kIq3SLevels[8] = {1, 3, 5, 7, 9, 11, 13, 15};
// The fp16 scales that make up for the formats' own factors.
constexpr unsigned kOne = 0x3c00, kFour = 0x4400, kEight = 0x4800;

template <std::size_t Levels>
std::uint8_t code_of(float value, const float (&levels)[Levels]) {
  std::uint8_t code = 0;
  while (code + 1u < Levels && levels[code] != value) ++code;
  return code;
}

// entry[0..Width) of `codes` for every index; `high` is where the bits of the index above the eighth go.
template <class Format, std::size_t Entries, std::size_t Width, std::size_t Levels>
void fill(std::uint8_t (&codes)[Entries][Width], unsigned scale, std::size_t high, const float (&levels)[Levels]) {
  for (std::size_t index = 0; index < Entries; ++index) {
    unsigned char block[Format::bytes] = {};
    block[0] = static_cast<unsigned char>(scale & 255);
    block[1] = static_cast<unsigned char>(scale >> 8);
    block[2] = static_cast<unsigned char>(index & 255);
    if (index > 255) block[high] = static_cast<unsigned char>(index >> 8);
    float values[8];
    Format::decode8(block, 0, values);
    for (std::size_t i = 0; i < Width; ++i) codes[index][i] = code_of(values[i], levels);
  }
}

template <class Lane, std::size_t Entries, std::size_t Width>
void widen(const std::uint8_t (&codes)[Entries][Width], Lane (&lanes)[Entries][Width]) {
  for (std::size_t index = 0; index < Entries; ++index) std::copy_n(codes[index], Width, lanes[index]);
}

// At most 11 bits, so that they are exact.
void fill_quads() {
  for (int nibble = 0; nibble < 16; ++nibble) {
    for (int i = 0; i < 3; ++i) {
      const float value = (0.5f + static_cast<float>(nibble)) / 4 * kIq2Levels[i];
      grid_codes.iq2_quads[nibble][i] = msl::float_to_half_bits(value);
    }
  }
}

void fill_all() {
  fill<msl::IQ2_XXS>(grid_codes.iq2_xxs, kEight, 0, kIq2Levels);
  fill<msl::IQ2_XS>(grid_codes.iq2_xs, kEight, 3, kIq2Levels);
  fill<msl::IQ2_S>(grid_codes.iq2_s, kEight, 66, kIq2Levels);
  fill<msl::IQ3_XXS>(grid_codes.iq3_xxs, kFour, 0, kIq3XxsLevels);
  fill<msl::IQ3_S>(grid_codes.iq3_s, kOne, 66, kIq3SLevels);
  fill_quads();
  widen(grid_codes.iq2_xxs, grid_codes.iq2_xxs_lanes);
  widen(grid_codes.iq2_xs, grid_codes.iq2_xs_words);
  widen(grid_codes.iq2_xs, grid_codes.iq2_xs_lanes);
  widen(grid_codes.iq3_xxs, grid_codes.iq3_xxs_lanes);
  widen(grid_codes.iq3_s, grid_codes.iq3_s_lanes);
  for (unsigned mask = 0; mask < 256; ++mask) {
    for (unsigned i = 0; i < 8; ++i) {
      const bool minus = ((mask >> i) & 1) != 0;
      grid_codes.sign4[mask][i] = minus ? 4 : 0;
      grid_codes.sign8[mask][i] = minus ? 8 : 0;
      if (mask >= 128) continue;
      bool odd = false;
      for (unsigned bit = 0; bit < 7; ++bit) odd ^= ((mask >> bit) & 1) != 0;
      const bool seven = i < 7 ? minus : odd;
      grid_codes.parity4[mask][i] = seven ? 4 : 0;
      grid_codes.parity8[mask][i] = seven ? 8 : 0;
    }
  }
}

}  // namespace

void fill_grid_codes() {
  static std::once_flag once;
  std::call_once(once, fill_all);
}

}  // namespace expertile::cpu
