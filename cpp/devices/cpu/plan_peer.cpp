// plan_peer.cpp: the plain counting sort.
#include <vector>

#include "devices/cpu/plan.h"

namespace expertile {

void plan_peer_positions(const std::int32_t* ids, std::uint32_t n_tokens, std::uint32_t top_k, std::uint32_t n_experts,
                         std::uint32_t tile_rows, std::int32_t* position) {
  const std::uint32_t n_entries = n_tokens * top_k;
  std::vector<std::uint32_t> next(n_experts, 0);
  for (std::uint32_t i = 0; i < n_entries; ++i) {
    const auto expert = static_cast<std::uint32_t>(ids[i]);
    if (expert < n_experts) ++next[expert];
  }
  std::uint32_t row = 0;
  for (std::uint32_t& of_expert : next) {
    const std::uint32_t count = of_expert;
    of_expert = row;
    row += (count + tile_rows - 1) / tile_rows * tile_rows;
  }
  for (std::uint32_t i = 0; i < n_entries; ++i) {
    const auto expert = static_cast<std::uint32_t>(ids[i]);
    position[i] = expert < n_experts ? static_cast<std::int32_t>(next[expert]++) : -1;
  }
}

}  // namespace expertile
