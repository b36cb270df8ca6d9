// tile_model.h: the tile instructions of devices/cpu/amx_tiles.h in plain C++, for machines without them.
//
// After the processor's description of tdpbf16ps: for each output, the even and the odd products are added up apart,
// each from zero in ascending order, then the two, then that to the sum. Subnormals do not occur: operands are halves
// or parts of them. What no program may do (use tiles without a layout, keep them behind a release) is an abort.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {

struct Tiles {
  static constexpr std::size_t kRow = 64;
  struct Tile {
    std::uint32_t word[16][16];
    bool set;
  };
  static inline thread_local Tile tile[8];
  static inline thread_local bool configured = false;

  static void configure() {
    configured = true;
    std::memset(tile, 0, sizeof(tile));
    for (Tile& t : tile) t.set = false;
  }
  static void release() { configured = false; }
  static void check(bool right) {
    if (!right) std::abort();
  }

  template <int T>
  static void zero() {
    check(configured);
    std::memset(&tile[T], 0, sizeof(Tile));
    tile[T].set = true;
  }
  template <int T>
  static void load(const void* from, std::size_t row_bytes) {
    check(configured);
    for (std::size_t row = 0; row < 16; ++row) {
      std::memcpy(tile[T].word[row], static_cast<const char*>(from) + row * row_bytes, kRow);
    }
    tile[T].set = true;
  }
  template <int T>
  static void store(void* to, std::size_t row_bytes) {
    check(configured && tile[T].set);
    for (std::size_t row = 0; row < 16; ++row) {
      std::memcpy(static_cast<char*>(to) + row * row_bytes, tile[T].word[row], kRow);
    }
  }
  static float value(std::uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
  }
  template <int C, int A, int B>
  static void dot() {
    check(configured && tile[C].set && tile[A].set && tile[B].set);
    for (std::size_t m = 0; m < 16; ++m) {
      for (std::size_t n = 0; n < 16; ++n) {
        float even = 0.0f, odd = 0.0f;
        for (std::size_t k = 0; k < 16; ++k) {
          const std::uint32_t a = tile[A].word[m][k], b = tile[B].word[k][n];
          even += value(a << 16) * value(b << 16);
          odd += value(a & 0xffff0000u) * value(b & 0xffff0000u);
        }
        const float sum = value(tile[C].word[m][n]) + (even + odd);
        std::memcpy(&tile[C].word[m][n], &sum, 4);
      }
    }
  }
};

}  // namespace
