// plan.h: the ends of the plan on the cpu device, and the peer that its plan is measured against.
#pragma once

#include <cstdint>

namespace expertile {

struct NativeCall;

// gather.cpp; found by their kernels' names through find_native_plan.
void cpu_mm_gather(const NativeCall& call);
void cpu_mm_gather_h(const NativeCall& call);
void cpu_mm_combine(const NativeCall& call);

// A plain counting sort of ids[n_tokens * top_k], one thread, no blocks: only the rows of the entries (-1 = skipped).
// The naive version: an oracle for `position` and the time to beat.
void plan_peer_positions(const std::int32_t* ids, std::uint32_t n_tokens, std::uint32_t top_k, std::uint32_t n_experts,
                         std::uint32_t tile_rows, std::int32_t* position);

}  // namespace expertile
