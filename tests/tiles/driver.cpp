// driver.cpp: the products of the "amx" table, built with a model of the tiles, for test_tiles.py.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "devices/cpu/panel_gemm.h"

namespace expertile::cpu {
GridCodes grid_codes;  // of the formats without a grid, none is read
}  // namespace expertile::cpu

using namespace expertile;

static Type type_of(const std::string& name) {
  for (const TypeInfo& info : type_table()) {
    if (name == info.name) return info.type;
  }
  std::abort();
}

// sums [count][n_weights] of rows first_row .. first_row + count of `rows` [n_rows][n_inner] halves, panel by panel of
// a multiple of `together` weights; by tiles in both precisions, or with `mixed` in bf16 alone.
extern "C" void tile_product(int mixed, const char* type, int bf16, const std::uint8_t* weights,
                             std::uint64_t row_bytes, int n_weights, const std::uint16_t* rows, std::uint64_t n_rows,
                             std::uint64_t n_inner, std::uint64_t first_row, std::uint64_t count, float* sums,
                             std::uint64_t together) {
  const cpu::Kernels& kernels = mixed != 0 ? *cpu::avx512_amx_kernels() : *cpu::amx_kernels();
  const cpu::PanelGemm gemm(kernels, type_of(type), cpu::Operand::Half, bf16 != 0 ? Precision::Bf16 : Precision::Exact,
                            n_inner, together);
  // What is not written must not matter: everything starts as NaN.
  std::vector<float> block(gemm.block_floats(n_rows), __builtin_nanf(""));
  std::vector<float> scratch(gemm.scratch_bytes() / sizeof(float), __builtin_nanf(""));
  gemm.convert_rows([&](std::size_t row) { return rows + row * n_inner; }, 0, n_rows, n_rows, block.data());
  const int most = static_cast<int>(std::max<std::uint64_t>(1, gemm.panel_weights(n_rows) / together) * together);
  for (int first = 0; first < n_weights; first += most) {
    const int n = n_weights - first < most ? n_weights - first : most;
    std::vector<const std::uint8_t*> pointers;
    for (int i = 0; i < n; ++i) pointers.push_back(weights + static_cast<std::uint64_t>(first + i) * row_bytes);
    gemm.multiply(
        {pointers.data(), n, block.data(), n_rows, first_row, count, sums + first, static_cast<std::size_t>(n_weights)},
        reinterpret_cast<std::byte*>(scratch.data()));
  }
}
extern "C" std::uint64_t max_rows() {
  return cpu::PanelGemm(*cpu::amx_kernels(), Type::F16, cpu::Operand::Half, Precision::Exact, 32).max_rows();
}
