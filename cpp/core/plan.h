// plan.h: the plan's buffers, their sizes, and the launches that fill them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "args.h"
#include "expertile/program.h"

namespace expertile {

struct PlanBuffers {
  BufferRef ids;            // i32 [T, K]
  BufferRef weights;        // f32 [T, K]
  BufferRef block_count;    // u32 [n_blocks, E]
  BufferRef block_offset;   // u32 [n_blocks, E], where a variant makes it
  BufferRef expert_offset;  // u32 [E + 1]
  BufferRef tiles;          // u32x4 [max_rows / M]
  BufferRef row_token;      // i32 [max_rows]
  BufferRef row_weight;     // f32 [max_rows]
  BufferRef position;       // i32 [T, K]
  BufferRef meta;           // u32 [14]
};

// Bound on n_rows, a multiple of tile_rows: T*K entries and min(T*K, E) experts with tile_rows - 1 rows of padding.
// Throws std::invalid_argument naming the limit that a size breaks.
std::uint32_t max_rows(std::uint32_t n_tokens, std::uint32_t top_k, std::uint32_t n_experts, std::uint32_t tile_rows);

// Sizes to arguments, with the column tiles of the two grouped GEMMs for the grids in meta.
args::PlanArgs plan_args(std::uint32_t n_tokens, std::uint32_t top_k, std::uint32_t n_experts, std::uint32_t tile_rows,
                         std::uint32_t gate_up_columns, std::uint32_t down_columns);

// "baseline", "padscan", "onegroup", "two_dispatch", "single". The same bits in every array that two of them make.
const std::vector<std::string>& plan_variants();

// The groups of one plan over args.n_tokens > 0 tokens. `two_dispatch` takes a middle launch from
// kMiddleLaunchBlocks blocks on; "two_dispatch_counts" and "two_dispatch_offsets" name its two forms at any size. Two
// threadgroups place a block; with "_quarters" behind the form's name, four. `single`, whose counts are of 16 bits, is
// `two_dispatch` beyond kSingleEntries.
inline constexpr std::uint32_t kSingleEntries = 65535;
inline constexpr std::uint32_t kMiddleLaunchBlocks = 96;
std::vector<Group> plan_groups(const std::string& variant, const args::PlanArgs& args, const PlanBuffers& buffers);

// The variant that is the fastest measured on a kind of device.
std::string default_plan(const std::string& device_kind, std::uint32_t n_tokens);

}  // namespace expertile
