// AMX bf16 tiles beside AVX-512 and its BF16. Compiled with these flags; tests compile it with a model of the tiles.
#include "devices/cpu/kernels.h"

#if defined(EXPERTILE_TILE_MODEL)
#include "devices/cpu/simd_avx2.h"

#include EXPERTILE_TILE_MODEL
#elif defined(__AVX512BF16__) && defined(__AVX512VBMI__) && defined(__x86_64__) && defined(__linux__)
#include "devices/cpu/simd_avx512.h"

#include "devices/cpu/amx_tiles.h"
#define EXPERTILE_TILES
#endif

#if defined(EXPERTILE_TILE_MODEL) || defined(EXPERTILE_TILES)
#include "devices/cpu/formats.h"
#include "devices/cpu/tile_gemm.h"
#if defined(EXPERTILE_TILES)
#include "devices/cpu/pack_vbmi.h"
#else
constexpr auto packing_format = format<true>;
#endif

namespace expertile::cpu {

const Kernels* amx_kernels() {
  static constexpr TileKernels tiles = tile_kernels();
  static constexpr Kernels table = [] {
    Kernels made = table_of<4, 6>("amx", {.direct_rows = 4, .inner_step = 1024, .panel_weights = 32}, packing_format);
    made.tiles = &tiles;
    return made;
  }();
  return &table;
}

}  // namespace expertile::cpu
#else
namespace expertile::cpu {
const Kernels* amx_kernels() { return nullptr; }
}  // namespace expertile::cpu
#endif
