// amx_tiles.h: the tile instructions of AMX that the products need. For units compiled for AVX-512 on Linux.
//
// Eight tiles of 16 rows of 64 bytes. Each function is one instruction; "memory" keeps the compiler from moving what
// the decoders write behind the load of it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace {

struct Tiles {
  static constexpr std::size_t kRow = 64;

  static void configure() {
    struct alignas(64) {
      std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
      std::uint16_t row_bytes[16] = {kRow, kRow, kRow, kRow, kRow, kRow, kRow, kRow};
      std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } layout;
    static_assert(sizeof(layout) == 64);
    asm volatile("ldtilecfg %0" ::"m"(layout) : "memory");
  }
  static void release() { asm volatile("tilerelease" ::: "memory"); }

  template <int T>
  static void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
  }
  template <int T>
  static void load(const void* from, std::size_t row_bytes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(row_bytes), "i"(T) : "memory");
  }
  template <int T>
  static void store(void* to, std::size_t row_bytes) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(row_bytes), "i"(T) : "memory");
  }
  // c[m][n] += sum over the words k of both products of bf16 in a[m][k] and b[k][n].
  template <int C, int A, int B>
  static void dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
};

}  // namespace
