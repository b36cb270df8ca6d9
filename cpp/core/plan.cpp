// plan.cpp: the variants of the plan as groups of launches.
#include "core/plan.h"

#include <algorithm>

#include "expertile/config.h"
#include "expertile/error.h"

namespace expertile {
namespace {

constexpr std::uint32_t kMaxTileRows = 65535;  // the kernels keep the rows of a tile in 16 bits
static_assert(std::uint64_t{kMaxTokens} * kMaxTopK + std::uint64_t{kMaxExperts} * (kMaxTileRows - 1) < 1ull << 31,
              "rows are int32");

std::uint32_t ceil_div(std::uint32_t a, std::uint32_t b) { return a / b + (a % b != 0); }

void check_size(const char* name, std::uint64_t value, std::uint64_t limit) {
  if (value == 0 || value > limit) {
    throw std::invalid_argument(expected_got(std::string("plan: ") + name, "1 to " + std::to_string(limit), value));
  }
}

// The launches of one plan, every binding with the bytes that this many tokens use.
class Builder {
 public:
  Builder(const args::PlanArgs& args, const PlanBuffers& buffers) : args_(args), buffers_(buffers) {}

  Launch clear() const {
    return launch("mm_clear", ceil_div(args_.max_rows, 256), {row_token(Access::Write), row_weight(Access::Write)});
  }
  Launch hist() const { return launch("mm_hist", args_.n_blocks, {ids(), block_count(Access::Write)}); }
  Launch scan() const {
    return launch(
        "mm_scan", 1,
        {block_count(Access::Read), block_offset(Access::Write), expert_offset(Access::Write), tiles(), meta()});
  }
  Launch scan_pad() const {
    return launch("mm_scan_pad", 1,
                  {block_count(Access::Read), block_offset(Access::Write), expert_offset(Access::Write), tiles(),
                   row_token(Access::Write), row_weight(Access::Write), meta()});
  }
  Launch onegroup() const {
    return launch("mm_onegroup", 1,
                  {ids(), block_count(Access::Write), block_offset(Access::Write), expert_offset(Access::Write),
                   tiles(), row_token(Access::Write), row_weight(Access::Write), meta()});
  }
  // mm_place keeps the rows that mm_clear or mm_scan_pad wrote and that no entry takes: ReadWrite.
  Launch place(const char* kernel) const {
    return launch(kernel, args_.n_blocks,
                  {ids(), weights(), block_offset(Access::Read), expert_offset(Access::Read),
                   row_token(Access::ReadWrite), row_weight(Access::ReadWrite), position()});
  }
  Launch scan_blocks() const {
    return launch("mm_scan_blocks", ceil_div(args_.n_experts, 32),
                  {block_count(Access::Read), block_offset(Access::Write)});
  }
  Launch place_from_counts(std::uint32_t parts) const {
    return launch("mm_place_from_counts", place_groups(parts),
                  {ids(), weights(), block_count(Access::Read), expert_offset(Access::Write), tiles(),
                   row_token(Access::Write), row_weight(Access::Write), position(), meta()});
  }
  Launch place_from_offsets(std::uint32_t parts) const {
    return launch(
        "mm_place_from_offsets", place_groups(parts),
        {ids(), weights(), block_count(Access::Read), block_offset(Access::Read), expert_offset(Access::Write), tiles(),
         row_token(Access::Write), row_weight(Access::Write), position(), meta()});
  }
  Launch single() const {
    return launch("mm_single", place_groups(4),
                  {ids(), weights(), block_count(Access::Write), expert_offset(Access::Write), tiles(),
                   row_token(Access::Write), row_weight(Access::Write), position(), meta()});
  }

 private:
  Launch launch(const char* kernel, std::uint32_t grid, std::vector<Binding> bindings) const {
    Launch out;
    out.kernel = kernel;
    out.args = pack_args(args_);
    out.buffers = std::move(bindings);
    out.grid.size = {grid, 1, 1};
    out.step = "plan";
    return out;
  }
  std::uint32_t place_groups(std::uint32_t parts) const {
    return std::max(args_.n_blocks * parts, static_cast<std::uint32_t>(EXPERTILE_PLACE_GROUPS));
  }
  std::uint64_t block_bytes() const { return std::uint64_t{args_.n_blocks} * args_.n_experts * 4; }
  Binding ids() const { return {buffers_.ids, Access::Read, 0, std::uint64_t{args_.n_entries} * 4, "ids"}; }
  Binding weights() const { return {buffers_.weights, Access::Read, 0, std::uint64_t{args_.n_entries} * 4, "weights"}; }
  Binding block_count(Access access) const { return {buffers_.block_count, access, 0, block_bytes(), "block_count"}; }
  Binding block_offset(Access access) const {
    return {buffers_.block_offset, access, 0, block_bytes(), "block_offset"};
  }
  Binding expert_offset(Access access) const {
    return {buffers_.expert_offset, access, 0, (std::uint64_t{args_.n_experts} + 1) * 4, "expert_offset"};
  }
  Binding tiles() const {
    return {buffers_.tiles, Access::Write, 0, std::uint64_t{args_.max_rows / args_.tile_rows} * 16, "tiles"};
  }
  Binding row_token(Access access) const {
    return {buffers_.row_token, access, 0, std::uint64_t{args_.max_rows} * 4, "row_token"};
  }
  Binding row_weight(Access access) const {
    return {buffers_.row_weight, access, 0, std::uint64_t{args_.max_rows} * 4, "row_weight"};
  }
  Binding position() const {
    return {buffers_.position, Access::Write, 0, std::uint64_t{args_.n_entries} * 4, "position"};
  }
  Binding meta() const { return {buffers_.meta, Access::Write, 0, EXPERTILE_META_WORDS * 4, "meta"}; }

  const args::PlanArgs& args_;
  const PlanBuffers& buffers_;
};

Group group(const char* name, std::vector<Launch> launches) { return {name, std::move(launches)}; }

}  // namespace

std::uint32_t max_rows(std::uint32_t n_tokens, std::uint32_t top_k, std::uint32_t n_experts, std::uint32_t tile_rows) {
  check_size("n_experts", n_experts, kMaxExperts);
  check_size("top_k", top_k, std::min(n_experts, kMaxTopK));
  check_size("n_tokens", n_tokens, kMaxTokens);
  check_size("tile_rows", tile_rows, kMaxTileRows);
  const std::uint64_t entries = std::uint64_t{n_tokens} * top_k;
  const std::uint64_t bound = entries + std::min<std::uint64_t>(entries, n_experts) * (tile_rows - 1);
  const std::uint64_t rows = (bound + tile_rows - 1) / tile_rows * tile_rows;
  return static_cast<std::uint32_t>(rows);
}

args::PlanArgs plan_args(std::uint32_t n_tokens, std::uint32_t top_k, std::uint32_t n_experts, std::uint32_t tile_rows,
                         std::uint32_t gate_up_columns, std::uint32_t down_columns) {
  const std::uint32_t rows = max_rows(n_tokens, top_k, n_experts, tile_rows);
  const std::uint32_t entries = n_tokens * top_k;
  return {n_tokens, n_experts,       top_k,       tile_rows, entries, ceil_div(entries, EXPERTILE_BLOCK_ENTRIES),
          rows,     gate_up_columns, down_columns};
}

const std::vector<std::string>& plan_variants() {
  static const std::vector<std::string> names = {"baseline", "padscan", "onegroup", "two_dispatch", "single"};
  return names;
}

std::vector<Group> plan_groups(const std::string& variant, const args::PlanArgs& args, const PlanBuffers& buffers) {
  const Builder b(args, buffers);
  if (variant == "baseline") {
    return {group("plan: clear, count", {b.clear(), b.hist()}), group("plan: scan", {b.scan()}),
            group("plan: place", {b.place("mm_place")})};
  }
  if (variant == "padscan") {
    return {group("plan: count", {b.hist()}), group("plan: scan", {b.scan_pad()}),
            group("plan: place", {b.place("mm_place_two_level")})};
  }
  if (variant == "onegroup") {
    return {group("plan: count, scan", {b.onegroup()}), group("plan: place", {b.place("mm_place_two_level")})};
  }
  if (variant == "single" && args.n_entries <= kSingleEntries) {
    return {group("plan", {b.single()})};
  }
  const bool either = variant == "two_dispatch" || variant == "single";
  const bool quarters = variant.ends_with("_quarters");
  const std::string form = quarters ? variant.substr(0, variant.size() - 9) : variant;
  const std::uint32_t parts = quarters ? 4 : 2;
  if (form == "two_dispatch_offsets" || (either && args.n_blocks >= kMiddleLaunchBlocks)) {
    return {group("plan: count", {b.hist()}), group("plan: scan", {b.scan_blocks()}),
            group("plan: place", {b.place_from_offsets(parts)})};
  }
  if (form == "two_dispatch_counts" || either) {
    return {group("plan: count", {b.hist()}), group("plan: place", {b.place_from_counts(parts)})};
  }
  std::string known;
  for (const std::string& name : plan_variants()) {
    known += (known.empty() ? "" : ", ") + name;
  }
  throw std::invalid_argument(expected_got("plan: variant", "one of " + known, variant));
}

std::string default_plan(const std::string& device_kind, std::uint32_t n_tokens) {
  // Rows: kind, the first n_tokens it holds for, variant. The last row that fits counts.
  struct Row {
    const char* kind;
    std::uint32_t from;
    const char* variant;
  };
  static constexpr Row kTable[] = {
      // One core of an EPYC 7001, 512 experts, 10 a token, us a layer without and with the middle launch: 205 and 220
      // at 8,192 tokens, 1,399 and 1,702 at 32,768, 7,446 and 8,058 at 131,072.
      {"cpu", 0, "two_dispatch_counts"},
      {"emulator", 0, "two_dispatch"},
      {"metal", 0, "two_dispatch"},
      // One NVIDIA H200, 512 experts, 10 a token (results/h200/plan.json), us a layer: the single launch 3.46 to 4.31
      // at 128 tokens, 4.44 to 4.48 at 512, 5.76 to 5.51 at 1,024; the middle launch 6.88 to 9.68 at 4,096.
      {"cuda", 0, "single"},
      {"cuda", 640, "two_dispatch_counts_quarters"},
      {"cuda", 3072, "two_dispatch_offsets"},
  };
  std::string variant = "padscan";
  for (const Row& row : kTable) {
    if (device_kind == row.kind && n_tokens >= row.from) {
      variant = row.variant;
    }
  }
  return variant;
}

}  // namespace expertile
