// plan.cpp: the plan kernels, native.
//
// The blocks of 1,024 entries are what the arrays speak of; here a thread takes a run of blocks and carries its offsets
// from one to the next, so that only the first block of a run looks at the counts before it.
#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "args.h"
#include "devices/cpu/native.h"
#include "devices/cpu/plan.h"
#include "devices/cpu/plan_rows.h"
#include "devices/cpu/thread_pool.h"

namespace expertile {
namespace {

using namespace plan_rows;

constexpr std::size_t kRunBlocks = 8;     // fewer blocks a thread are not worth waking it
constexpr std::size_t kRunColumns = 256;  // experts a thread walks through all blocks, the same
constexpr std::size_t kLineRows = 16;     // rows of a cache line: whole lines a thread, and no store across two
constexpr std::size_t kRunLines = 512;

struct Tile {
  u32 expert, first_row, rows, zero;
};

std::size_t round_up(std::size_t value, std::size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// body(e, type) for the experts from..to-1: fours of them as a vector, the rest singly. Spelled out, as compilers make
// vectors of such loops only where they see that the arrays are apart.
template <class Body>
void for_each_expert(std::size_t from, std::size_t to, Body&& body) {
  for (; from + 4 <= to; from += 4) body(from, UInt4{});
  for (; from < to; ++from) body(from, u32{});
}

void add(u32* sum, const u32* counts, std::size_t n) {
  for_each_expert(0, n, [=](std::size_t e, auto type) {
    using Counts = decltype(type);
    store(sum + e, load<Counts>(sum + e) + load<Counts>(counts + e));
  });
}

// The sums over `n_blocks` rows of n counts, four rows at a time: in the order of memory, where columns would miss.
void sum_counts(const u32* counts, std::size_t n_blocks, std::size_t n, u32* sums) {
  std::fill_n(sums, n, 0u);
  std::size_t b = 0;
  for (; b + 4 <= n_blocks; b += 4) {
    const u32* rows = counts + b * n;
    for_each_expert(0, n, [=](std::size_t e, auto type) {
      using Counts = decltype(type);
      const Counts front = load<Counts>(rows + e) + load<Counts>(rows + n + e);
      const Counts back = load<Counts>(rows + 2 * n + e) + load<Counts>(rows + 3 * n + e);
      store(sums + e, load<Counts>(sums + e) + (front + back));
    });
  }
  for (; b < n_blocks; ++b) add(sums, counts + b * n, n);
}

void count_block(const PlanArgs& a, const i32* __restrict ids, std::size_t block, u32* __restrict counts) {
  const u32 n_experts = a.n_experts;
  std::fill_n(counts, n_experts, 0u);
  const std::size_t end = std::min<std::size_t>(a.n_entries, (block + 1) * kBlock);
  const auto count_one = [&](u32 expert) {
    if (expert < n_experts) ++counts[expert];
  };
  std::size_t i = block * kBlock;
  for (; i + 4 <= end; i += 4) {
    const u64 low = load<u64>(ids + i), high = load<u64>(ids + i + 2);
    count_one(static_cast<u32>(low));
    count_one(static_cast<u32>(low >> 32));
    count_one(static_cast<u32>(high));
    count_one(static_cast<u32>(high >> 32));
  }
  for (; i < end; ++i) count_one(static_cast<u32>(ids[i]));
}

void count_blocks(const PlanArgs& a, const i32* ids, u32* block_count, ThreadPool& pool) {
  pool.run_ranges(a.n_blocks, kRunBlocks, [&](std::size_t from, std::size_t to, int) {
    for (std::size_t b = from; b < to; ++b) count_block(a, ids, b, block_count + b * a.n_experts);
  });
}

// block_offset from block_count; leaves each expert's entries in `totals`.
void scan_blocks(const PlanArgs& a, const u32* block_count, u32* block_offset, u32* totals, ThreadPool& pool) {
  const std::size_t n = a.n_experts;
  const std::size_t grain = a.n_blocks >= 4 * kRunBlocks ? kRunColumns : n;
  pool.run_ranges(n, grain, [&](std::size_t from, std::size_t to, int) {
    std::fill(totals + from, totals + to, 0u);
    for (std::size_t b = 0; b < a.n_blocks; ++b) {
      const u32* counts = block_count + b * n;
      u32* offsets = block_offset + b * n;
      for_each_expert(from, to, [=](std::size_t e, auto type) {
        const auto sum = load<decltype(type)>(totals + e);
        store(offsets + e, sum);
        store(totals + e, sum + load<decltype(type)>(counts + e));
      });
    }
  });
}

// From each expert's entries to expert_offset, tiles and meta; pad_tile(row) for the last tile of each, from `row` on.
// How many tiles an expert has is nothing that a processor can foresee, unless most have one: else four are written
// wherever there is room.
template <class PadTile>
void finish(const PlanArgs& a, const u32* totals, u32* expert_offset, Tile* tiles, u32* meta, PadTile&& pad_tile) {
  const u32 m = a.tile_rows;
  const std::ptrdiff_t last_four = a.n_entries > std::size_t{a.n_experts} * m ? std::ptrdiff_t{a.max_rows / m} - 4 : -1;
  Tile* tile = tiles;
  u32 row = 0, kept = 0, active = 0, largest = 0;
  for (u32 e = 0; e < a.n_experts; ++e) {
    const u32 count = totals[e];
    expert_offset[e] = row;
    if (count == 0) continue;
    Int4 words = {static_cast<i32>(e), static_cast<i32>(row), static_cast<i32>(m), 0};
    u32 written = 0;
    const auto write = [&] {
      store(tile + written++, words);
      words += Int4{0, static_cast<i32>(m), 0, 0};
    };
    const u32 n = count <= 4 * m ? 1 + (count > m) + (count > 2 * m) + (count > 3 * m) : (count + m - 1) / m;
    if (tile - tiles <= last_four) {
      while (written < 4) write();
    }
    while (written < n) write();
    tile += n;
    tile[-1].rows = count - (n - 1) * m;
    row += n * m;
    pad_tile(row - m);
    kept += count;
    ++active;
    largest = std::max(largest, count);
  }
  expert_offset[a.n_experts] = row;
  const u32 n_tiles = static_cast<u32>(tile - tiles), grid = std::max(n_tiles, 1u);
  const u32 words[EXPERTILE_META_WORDS] = {row,    n_tiles, kept,
                                           active, largest, std::max(row, 1u),
                                           1,      1,       std::max(a.gate_up_columns, 1u),
                                           grid,   1,       std::max(a.down_columns, 1u),
                                           grid,   1};
  std::memcpy(meta, words, sizeof(words));
}

// The padding rows, where the entries are placed by another kernel.
void pad(const PlanArgs& a, const u32* totals, const u32* expert_offset, RowArrays rows) {
  for (u32 e = 0; e < a.n_experts; ++e) {
    for (u32 row = expert_offset[e] + totals[e]; row < expert_offset[e + 1]; ++row) {
      rows.token[row] = -1;
      rows.weight[row] = 0.0f;
    }
  }
}

u64* pairs_of(const PlanArgs& a, ThreadPool& pool, std::size_t words_before, u32** words) {
  const std::size_t bytes = round_up(words_before * sizeof(u32), 64);
  std::byte* memory = pool.shared_scratch(bytes + std::size_t{a.max_rows} * sizeof(u64));
  *words = reinterpret_cast<u32*>(memory);
  return reinterpret_cast<u64*>(memory + bytes);
}

void split_rows(const Entries& entries, std::size_t n_rows, ThreadPool& pool) {
  const std::size_t lines = (n_rows + kLineRows - 1) / kLineRows;
  pool.run_ranges(lines, kRunLines, [&](std::size_t from, std::size_t to, int) {
    split_pairs(entries.pairs, from * kLineRows, std::min(to * kLineRows, n_rows), entries.rows);
  });
}

// Places all blocks where the offsets of every block are known.
void place_from_offsets(const PlanArgs& a, const Entries& entries, bool all_kept, const u32* block_offset,
                        const u32* expert_offset, ThreadPool& pool) {
  const auto place = all_kept ? place_kept : place_blocks;
  pool.run_ranges(a.n_blocks, kRunBlocks, [&](std::size_t from, std::size_t to, int worker) {
    u32* next = reinterpret_cast<u32*>(pool.scratch(worker, a.n_experts * sizeof(u32)));
    std::copy_n(expert_offset, a.n_experts, next);
    add(next, block_offset + from * a.n_experts, a.n_experts);
    place(a, entries, from, to, next);
  });
  split_rows(entries, expert_offset[a.n_experts], pool);
}

// Offsets and places from the counts of the blocks alone, which it makes itself where `count` says so.
void place_from_counts(const PlanArgs& a, bool count, Entries entries, u32* block_count, u32* expert_offset,
                       Tile* tiles, u32* meta, ThreadPool& pool) {
  const std::size_t n = a.n_experts, stride = round_up(n, 16);
  const std::size_t runs =
      std::clamp<std::size_t>(a.n_blocks / kRunBlocks, 1, static_cast<std::size_t>(pool.threads()));
  u32* totals;
  entries.pairs = pairs_of(a, pool, (runs + 1) * stride, &totals);
  const auto next_of = [&](std::size_t run) { return totals + (run + 1) * stride; };
  const auto first_of = [&](std::size_t run) { return a.n_blocks * run / runs; };
  pool.run(runs, [&](std::size_t run, int) {
    const std::size_t first = first_of(run), last = first_of(run + 1);
    for (std::size_t b = first; count && b < last; ++b) count_block(a, entries.ids, b, block_count + b * n);
    sum_counts(block_count + first * n, last - first, n, next_of(run));
  });
  std::fill_n(totals, n, 0u);
  for (std::size_t run = 0; run < runs; ++run) {
    u32* next = next_of(run);
    for_each_expert(0, n, [=](std::size_t e, auto type) {
      const auto own = load<decltype(type)>(next + e), before = load<decltype(type)>(totals + e);
      store(next + e, before);
      store(totals + e, before + own);
    });
  }
  finish(a, totals, expert_offset, tiles, meta, [&](u32 row) { pad_tile(entries.pairs + row, a.tile_rows); });
  const auto place = meta[EXPERTILE_META_KEPT] == a.n_entries ? place_kept : place_blocks;
  pool.run(runs, [&](std::size_t run, int) {
    add(next_of(run), expert_offset, n);
    place(a, entries, first_of(run), first_of(run + 1), next_of(run));
  });
  split_rows(entries, expert_offset[n], pool);
}

void mm_clear(const NativeCall& call) {
  const auto& a = call.arguments<PlanArgs>();
  std::fill_n(call.buffer<i32>(1), a.max_rows, -1);
  std::fill_n(call.buffer<float>(2), a.max_rows, 0.0f);
}

void mm_hist(const NativeCall& call) {
  count_blocks(call.arguments<PlanArgs>(), call.buffer<const i32>(1), call.buffer<u32>(2), call.pool);
}

u32* totals_of(const NativeCall& call) {
  return reinterpret_cast<u32*>(call.pool.shared_scratch(call.arguments<PlanArgs>().n_experts * sizeof(u32)));
}

void mm_scan(const NativeCall& call) {
  const auto& a = call.arguments<PlanArgs>();
  u32* totals = totals_of(call);
  scan_blocks(a, call.buffer<const u32>(1), call.buffer<u32>(2), totals, call.pool);
  finish(a, totals, call.buffer<u32>(3), call.buffer<Tile>(4), call.buffer<u32>(5), [](u32) {});
}

void mm_scan_pad(const NativeCall& call) {
  const auto& a = call.arguments<PlanArgs>();
  u32* totals = totals_of(call);
  scan_blocks(a, call.buffer<const u32>(1), call.buffer<u32>(2), totals, call.pool);
  finish(a, totals, call.buffer<u32>(3), call.buffer<Tile>(4), call.buffer<u32>(7), [](u32) {});
  pad(a, totals, call.buffer<u32>(3), {call.buffer<i32>(5), call.buffer<float>(6)});
}

void mm_onegroup(const NativeCall& call) {
  const auto& a = call.arguments<PlanArgs>();
  u32* totals = totals_of(call);
  count_blocks(a, call.buffer<const i32>(1), call.buffer<u32>(2), call.pool);
  scan_blocks(a, call.buffer<const u32>(2), call.buffer<u32>(3), totals, call.pool);
  finish(a, totals, call.buffer<u32>(4), call.buffer<Tile>(5), call.buffer<u32>(8), [](u32) {});
  pad(a, totals, call.buffer<u32>(4), {call.buffer<i32>(6), call.buffer<float>(7)});
}

void mm_scan_blocks(const NativeCall& call) {
  scan_blocks(call.arguments<PlanArgs>(), call.buffer<const u32>(1), call.buffer<u32>(2), totals_of(call), call.pool);
}

// One for mm_place and mm_place_two_level: in order, a rank is what the counter says.
void mm_place(const NativeCall& call) {
  const auto& a = call.arguments<PlanArgs>();
  u32* none;
  const Entries entries{call.buffer<const i32>(1),
                        call.buffer<const float>(2),
                        call.buffer<i32>(7),
                        {call.buffer<i32>(5), call.buffer<float>(6)},
                        pairs_of(a, call.pool, 0, &none)};
  const u32* expert_offset = call.buffer<const u32>(4);
  for (u32 e = 0; e < a.n_experts; ++e) {
    const u32 end = expert_offset[e + 1];
    if (end > expert_offset[e]) pad_tile(entries.pairs + end - a.tile_rows, a.tile_rows);
  }
  place_from_offsets(a, entries, false, call.buffer<const u32>(3), expert_offset, call.pool);
}

void mm_place_from_offsets(const NativeCall& call) {
  const auto& a = call.arguments<PlanArgs>();
  u32* totals;
  u64* pairs = pairs_of(a, call.pool, a.n_experts, &totals);
  const Entries entries{call.buffer<const i32>(1),
                        call.buffer<const float>(2),
                        call.buffer<i32>(9),
                        {call.buffer<i32>(7), call.buffer<float>(8)},
                        pairs};
  const u32* block_offset = call.buffer<const u32>(4);
  const std::size_t last = (a.n_blocks - std::size_t{1}) * a.n_experts;
  std::copy_n(block_offset + last, a.n_experts, totals);
  add(totals, call.buffer<const u32>(3) + last, a.n_experts);
  u32* meta = call.buffer<u32>(10);
  finish(a, totals, call.buffer<u32>(5), call.buffer<Tile>(6), meta,
         [&](u32 row) { pad_tile(pairs + row, a.tile_rows); });
  const bool all_kept = meta[EXPERTILE_META_KEPT] == a.n_entries;
  place_from_offsets(a, entries, all_kept, block_offset, call.buffer<const u32>(5), call.pool);
}

template <bool count>
void place_without_offsets(const NativeCall& call) {
  const Entries entries{call.buffer<const i32>(1),
                        call.buffer<const float>(2),
                        call.buffer<i32>(8),
                        {call.buffer<i32>(6), call.buffer<float>(7)},
                        nullptr};
  place_from_counts(call.arguments<PlanArgs>(), count, entries, call.buffer<u32>(3), call.buffer<u32>(4),
                    call.buffer<Tile>(5), call.buffer<u32>(9), call.pool);
}

}  // namespace

NativeKernel find_native_plan(const std::string& name) {
  static const std::unordered_map<std::string, NativeKernel> kernels = {
      {"mm_clear", mm_clear},
      {"mm_hist", mm_hist},
      {"mm_scan", mm_scan},
      {"mm_scan_pad", mm_scan_pad},
      {"mm_onegroup", mm_onegroup},
      {"mm_scan_blocks", mm_scan_blocks},
      {"mm_place", mm_place},
      {"mm_place_two_level", mm_place},
      {"mm_place_from_counts", place_without_offsets<false>},
      {"mm_place_from_offsets", mm_place_from_offsets},
      {"mm_single", place_without_offsets<true>},
      {"mm_gather", cpu_mm_gather},
      {"mm_gather_h", cpu_mm_gather_h},
      {"mm_combine", cpu_mm_combine},
      {"mm_combine_v4", cpu_mm_combine},
  };
  const auto found = kernels.find(name);
  return found == kernels.end() ? nullptr : found->second;
}

}  // namespace expertile
