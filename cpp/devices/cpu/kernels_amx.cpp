// AMX bf16 tiles beside AVX-512 and its BF16. Compiled with these flags; tests compile it with a model of the tiles.
#include "devices/cpu/kernels.h"

#if defined(EXPERTILE_TILE_MODEL)
#include "devices/cpu/simd_avx2.h"

#include EXPERTILE_TILE_MODEL
#elif defined(__AVX512BF16__) && defined(__AVX512FP16__) && defined(__x86_64__) && defined(__linux__)
#include "devices/cpu/simd_avx512.h"

#include "devices/cpu/amx_tiles.h"
#define EXPERTILE_TILES
#endif

#if defined(EXPERTILE_TILE_MODEL) || defined(EXPERTILE_TILES)
#include "devices/cpu/formats.h"
#include "devices/cpu/tile_gemm.h"
#if defined(EXPERTILE_TILES)
#include "devices/cpu/pack_bf16.h"
#else
constexpr auto packing_format = format<true>;
#endif

namespace expertile::cpu {

namespace {

constexpr TileKernels tiles = tile_kernels();

constexpr Kernels with_tiles(const char* name, bool exact) {
  Kernels made = table_of<4, 6>(name, {.direct_rows = 4, .inner_step = 640, .panel_weights = 8, .block_bytes = 1 << 20},
                                packing_format);
  made.tiles = &tiles;
  made.exact_by_tiles = exact;
  return made;
}

}  // namespace

const Kernels* amx_kernels() {
  static constexpr Kernels table = with_tiles("amx", true);
  return &table;
}

const Kernels* avx512_amx_kernels() {
  static constexpr Kernels table = with_tiles("avx512+amx", false);
  return &table;
}

}  // namespace expertile::cpu
#else
namespace expertile::cpu {
const Kernels* amx_kernels() { return nullptr; }
const Kernels* avx512_amx_kernels() { return nullptr; }
}  // namespace expertile::cpu
#endif
