// align_peer.h: the atomic plan of metal/bench/align_atomic.metal, a peer for the bench. No product kernel uses it.
#pragma once

#include <cstdint>
#include <vector>

#include "args.h"
#include "expertile/device.h"

namespace expertile {

struct AlignPeer {
  std::vector<double> seconds;          // a layer, once a repeat
  std::vector<std::int32_t> row_entry;  // entry of each row, n_entries = padding; any order inside an expert
};

// Runs a program of `layers` such plans over ids [T, K] on a CUDA device, `repeats` times.
AlignPeer time_align_peer(Device& device, const std::int32_t* ids, const args::PlanArgs& args, std::uint32_t layers,
                          std::uint32_t repeats);

}  // namespace expertile
