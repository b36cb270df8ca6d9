// sources.h: what metal/reflect.py generates at build time: the .metal files, embedded, each one text.
#pragma once

#include <vector>

namespace expertile::metal {

struct Source {
  const char* file;  // "gemm.metal"
  const char* text;  // with our headers in place of their includes: Metal's compiler can reach none
  bool uses_tiles;   // includes tile_mma.h, so it has a tensor form too
};
const std::vector<Source>& sources();

}  // namespace expertile::metal
