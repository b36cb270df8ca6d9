// plan_fused.metal: the plan of plan.metal in fewer launches; the same arrays, bit for bit.
//
//   onegroup      mm_onegroup (histogram and scan in one threadgroup), mm_place_two_level
//   two_dispatch  mm_hist, mm_place_from_counts; with many blocks mm_hist, mm_scan_blocks, mm_place_from_offsets
//   single        mm_single, for 65,535 entries at most
//
// Shapes, feeders and consumers as in plan.metal. Only onegroup and mm_scan_blocks make boff.
#include "plan_common.h"

// Counts all blocks, one after the other, by one threadgroup: bcnt, boff and the totals of owned experts.
METAL_FUNC void plan_count_blocks(constant PlanArgs& args, const device int* ids, device uint* bcnt, device uint* boff,
                                  uint thread_index, threadgroup atomic_uint* counts, thread uint* totals) {
  uint first;
  const uint owned = plan_owned(args, thread_index, first);
  for (uint j = 0; j < PLAN_OWNED; ++j) {
    totals[j] = 0;
    if (j < owned) {
      atomic_store_explicit(&counts[first + j], 0u, memory_order_relaxed);
    }
  }
  for (uint block = 0; block < args.n_blocks; ++block) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint expert = plan_expert(args, ids, block * EXPERTILE_BLOCK_ENTRIES + thread_index);
    if (expert < args.n_experts) {
      atomic_fetch_add_explicit(&counts[expert], 1u, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint j = 0; j < owned; ++j) {
      const ulong at = ulong(block) * args.n_experts + first + j;
      const uint count = atomic_load_explicit(&counts[first + j], memory_order_relaxed);
      atomic_store_explicit(&counts[first + j], 0u, memory_order_relaxed);
      bcnt[at] = count;
      boff[at] = totals[j];
      totals[j] += count;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

[[kernel, max_total_threads_per_threadgroup(PLAN_THREADS)]] void mm_onegroup(
    constant PlanArgs& args [[buffer(0)]], const device int* ids [[buffer(1)]], device uint* bcnt [[buffer(2)]],
    device uint* boff [[buffer(3)]], device uint* eoff [[buffer(4)]], device uint4* tiles [[buffer(5)]],
    device int* stok [[buffer(6)]], device float* sw [[buffer(7)]], device uint* meta [[buffer(8)]],
    uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simd [[simdgroup_index_in_threadgroup]]) {
  threadgroup uint partial[128];
  threadgroup uint shared_words[PLAN_MAX_EXPERTS + 1];  // counts of a block, then tile_start: both would not fit
  threadgroup ushort last_rows[PLAN_MAX_EXPERTS];
  uint totals[PLAN_OWNED];
  plan_count_blocks(args, ids, bcnt, boff, thread_index, reinterpret_cast<threadgroup atomic_uint*>(shared_words),
                    totals);
  plan_finish(args, totals, thread_index, lane, simd, partial, shared_words, last_rows, eoff, tiles, meta);
  plan_pad(args, shared_words, last_rows, lane, simd, stok, sw);
}

// boff from bcnt, a threadgroup for 32 experts (its lanes), a simdgroup for a 32nd of the blocks.
[[kernel, max_total_threads_per_threadgroup(PLAN_THREADS)]] void mm_scan_blocks(
    constant PlanArgs& args [[buffer(0)]], const device uint* bcnt [[buffer(1)]], device uint* boff [[buffer(2)]],
    uint group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
    uint simd [[simdgroup_index_in_threadgroup]]) {
  threadgroup uint sums[PLAN_THREADS];
  const uint expert = group * 32 + lane;
  const bool present = expert < args.n_experts;
  const uint share = plan_div_up(args.n_blocks, 32u);
  const uint from = min(simd * share, args.n_blocks);
  const uint to = min(from + share, args.n_blocks);
  uint unused;
  sums[simd * 32 + lane] =
      present ? plan_sum_blocks<8>(bcnt + ulong(from) * args.n_experts + expert, args.n_experts, to - from, 0, unused)
              : 0u;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (!present) {
    return;
  }
  uint before = 0;
  for (uint s = 0; s < simd; ++s) {
    before += sums[s * 32 + lane];
  }
  for (uint block = from; block < to; ++block) {
    const ulong at = ulong(block) * args.n_experts + expert;
    boff[at] = before;
    before += bcnt[at];
  }
}

// The place kernels of two_dispatch: 512 threads, so that the usual number of experts leaves none without one.
#define PLACE_THREADS 512
#define PLACE_OWNED 8  // PLAN_MAX_EXPERTS / PLACE_THREADS
#define PLACE_SUBS 16  // PLACE_THREADS / 32

// A block's entries are shared by 2 threadgroups, or by 4 where the grid has enough: a part is that many entries.
METAL_FUNC uint plan_parts(uint n_groups, uint n_blocks) { return n_groups >= 4 * n_blocks ? 4u : 2u; }

// A threadgroup's part of a block, and what it reads of it before anything else: all of it is on its way while the
// counts are summed. Ids as they are, ~0 for none.
struct PlacePart {
  uint block;
  uint skipped;  // entries of the block before the part
  uint entry;    // of this thread
  uint id;
  float weight;
  uint skipped_ids[2];  // of those before the part, what this thread counts
};

template <bool SKIPPED = true>
METAL_FUNC PlacePart plan_read_part(constant PlanArgs& args, const device int* ids, const device float* weights,
                                    uint thread_index, uint group, uint n_groups) {
  const uint parts = plan_parts(n_groups, args.n_blocks);
  const uint part_entries = EXPERTILE_BLOCK_ENTRIES / parts;
  PlacePart part;
  part.block = group / parts;
  part.skipped = group % parts * part_entries;
  const uint first = part.block * EXPERTILE_BLOCK_ENTRIES;  // of no block: past the last entry
  // A thread behind the part's end has no entry: one past all of them.
  part.entry = thread_index < part_entries ? first + part.skipped + thread_index : args.n_entries;
  part.id = part.entry < args.n_entries ? uint(ids[part.entry]) : ~0u;
  part.weight = part.entry < args.n_entries ? weights[part.entry] : 0.0f;
  for (uint i = 0; i < 2; ++i) {
    const uint at = thread_index + i * PLACE_THREADS;
    part.skipped_ids[i] = SKIPPED && at < part.skipped && first + at < args.n_entries ? uint(ids[first + at]) : ~0u;
  }
  return part;
}

// Every threadgroup scans the experts itself from `counts` (all entries of the owned experts) and `before` (those in
// earlier blocks), then places its part of a block, whose earlier entries it counts itself (`next_row`, cleared like
// the rank's counts). Tiles and padding rows are dealt out to all threadgroups in turn; there are
// EXPERTILE_PLACE_GROUPS of them at least, so that few blocks do not carry it all. OWNED: 1 for up to PLACE_THREADS
// experts, whose code is then short enough to stay in the instruction cache, else PLACE_OWNED.
template <uint OWNED>
METAL_FUNC void plan_place_part(constant PlanArgs& args, thread const PlacePart& part, thread const uint* counts,
                                thread const uint* before, uint same, bool counted, uint thread_index, uint group,
                                uint n_groups, uint lane, uint simd, threadgroup uint* partial,
                                threadgroup uint* next_row, threadgroup const uint4* words, device uint* eoff,
                                device uint4* tiles, device int* stok, device float* sw, device int* pos,
                                device uint* meta) {
  const bool reports = group + 1 == n_groups;
  const uint expert = min(part.id, args.n_experts);
  PlanTotals all;
  uint tile =
      plan_scan<PLACE_THREADS>(plan_totals<OWNED>(counts, OWNED, args.tile_rows), reports, lane, simd, partial, all);
  uint first;
  const uint owned = plan_owned<PLACE_THREADS>(args, thread_index, first);
  for (uint j = 0; j < OWNED; ++j) {
    if (j < owned) {
      const uint n_tiles = plan_div_up(counts[j], args.tile_rows);
      const uint row = tile * args.tile_rows;
      next_row[first + j] += row + before[j];
      if (reports) {
        eoff[first + j] = row;
      }
      for (uint t = group; t < n_tiles; t += n_groups) {
        const uint done = t * args.tile_rows;
        tiles[tile + t] = uint4(first + j, row + done, min(counts[j] - done, args.tile_rows), 0u);
      }
      for (uint r = counts[j] + group; r < n_tiles * args.tile_rows; r += n_groups) {
        stok[row + r] = -1;
        sw[row + r] = 0.0f;
      }
      tile += n_tiles;
    }
  }
  if (reports && thread_index == 0) {
    eoff[args.n_experts] = all.tiles * args.tile_rows;
    plan_write_meta(args, all, meta);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint row = plan_rank<PLACE_SUBS>(expert, same, args.n_experts, counted, lane, simd, words);
  row += expert < args.n_experts ? next_row[expert] : 0u;
  plan_put(args, expert, part.weight, part.entry, row, stok, sw, pos);
}

// What the place kernels make of ids alone: the entries of the block before the part counted, the part's own matched.
METAL_FUNC uint plan_match_part(constant PlanArgs& args, thread const PlacePart& part, uint lane, uint simd,
                                threadgroup uint4* pool) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  threadgroup atomic_uint* early = reinterpret_cast<threadgroup atomic_uint*>(pool);
  threadgroup uint4* words = pool + plan_div_up(args.n_experts, 4u);
  const bool counted = plan_counted<PLACE_SUBS>(args.n_experts);
  for (uint i = 0; i < 2; ++i) {
    if (part.skipped_ids[i] < args.n_experts) {
      atomic_fetch_add_explicit(&early[part.skipped_ids[i]], 1u, memory_order_relaxed);
    }
  }
  const uint expert = min(part.id, args.n_experts);
  const uint same = plan_match(expert, args.n_experts);
  plan_publish<PLACE_SUBS>(expert, same, args.n_experts, counted, lane, simd, words);
  return same;
}

// plan_place_part where the counts come from earlier launches.
template <uint OWNED>
METAL_FUNC void plan_place_behind(constant PlanArgs& args, thread const PlacePart& part, uint same,
                                  thread const uint* counts, thread const uint* before, uint thread_index, uint group,
                                  uint n_groups, uint lane, uint simd, threadgroup uint* partial,
                                  threadgroup uint4* pool, device uint* eoff, device uint4* tiles, device int* stok,
                                  device float* sw, device int* pos, device uint* meta) {
  same = PLAN_AHEAD ? same : plan_match_part(args, part, lane, simd, pool);
  threadgroup uint4* words = pool + plan_div_up(args.n_experts, 4u);
  const bool counted = plan_counted<PLACE_SUBS>(args.n_experts);
  plan_place_part<OWNED>(args, part, counts, before, same, counted, thread_index, group, n_groups, lane, simd, partial,
                         reinterpret_cast<threadgroup uint*>(pool), words, eoff, tiles, stok, sw, pos, meta);
}

// The counts before this part and the rank's start from zero.
METAL_FUNC void plan_clear_place(uint n_experts, uint thread_index, threadgroup uint4* pool) {
  const uint next_rows = plan_div_up(n_experts, 4u);
  for (uint i = thread_index; i < next_rows; i += PLACE_THREADS) {
    pool[i] = uint4(0u, 0u, 0u, 0u);
  }
  if (plan_counted<PLACE_SUBS>(n_experts)) {
    plan_clear_counts<PLACE_SUBS>(n_experts, thread_index, pool + next_rows);
  }
}

// counts and before of the owned experts from the counts of all blocks; `block` is this part's.
template <uint OWNED>
METAL_FUNC void plan_owned_counts(constant PlanArgs& args, const device uint* bcnt, uint block, uint thread_index,
                                  thread uint* counts, thread uint* before) {
  uint first;
  const uint owned = plan_owned<PLACE_THREADS>(args, thread_index, first);
  for (uint j = 0; j < OWNED; ++j) {
    counts[j] = 0;
    before[j] = 0;
    if (j < owned) {
      const device uint* column = bcnt + first + j;
      counts[j] = OWNED == 1 && args.n_blocks > 8
                      ? plan_sum_blocks<24>(column, args.n_experts, args.n_blocks, block, before[j])
                      : plan_sum_blocks<8>(column, args.n_experts, args.n_blocks, block, before[j]);
    }
  }
}

// The same from the offsets of the blocks.
template <uint OWNED>
METAL_FUNC void plan_owned_offsets(constant PlanArgs& args, const device uint* bcnt, const device uint* boff,
                                   uint block, uint thread_index, thread uint* counts, thread uint* before) {
  uint first;
  const uint owned = plan_owned<PLACE_THREADS>(args, thread_index, first);
  const ulong last = ulong(args.n_blocks - 1) * args.n_experts + first;
  const ulong mine = ulong(min(block, args.n_blocks - 1)) * args.n_experts + first;
  for (uint j = 0; j < OWNED; ++j) {
    counts[j] = j < owned ? boff[last + j] + bcnt[last + j] : 0u;
    before[j] = j < owned ? boff[mine + j] : 0u;
  }
}

[[kernel, max_total_threads_per_threadgroup(PLACE_THREADS)]] void mm_place_from_counts(
    constant PlanArgs& args [[buffer(0)]], const device int* ids [[buffer(1)]],
    const device float* weights [[buffer(2)]], const device uint* bcnt [[buffer(3)]], device uint* eoff [[buffer(4)]],
    device uint4* tiles [[buffer(5)]], device int* stok [[buffer(6)]], device float* sw [[buffer(7)]],
    device int* pos [[buffer(8)]], device uint* meta [[buffer(9)]], uint thread_index [[thread_index_in_threadgroup]],
    uint group [[threadgroup_position_in_grid]], uint n_groups [[threadgroups_per_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]) {
  threadgroup uint partial[128];
  threadgroup uint4 pool[PLAN_POOL];
  const PlacePart part = plan_read_part(args, ids, weights, thread_index, group, n_groups);
  plan_clear_place(args.n_experts, thread_index, pool);
  const uint same = PLAN_AHEAD ? plan_match_part(args, part, lane, simd, pool) : 0u;
  await_inputs();
  if (args.n_experts <= PLACE_THREADS) {
    uint counts[1], before[1];
    plan_owned_counts<1>(args, bcnt, part.block, thread_index, counts, before);
    plan_place_behind<1>(args, part, same, counts, before, thread_index, group, n_groups, lane, simd, partial, pool,
                         eoff, tiles, stok, sw, pos, meta);
  } else {
    uint counts[PLACE_OWNED], before[PLACE_OWNED];
    plan_owned_counts<PLACE_OWNED>(args, bcnt, part.block, thread_index, counts, before);
    plan_place_behind<PLACE_OWNED>(args, part, same, counts, before, thread_index, group, n_groups, lane, simd, partial,
                                   pool, eoff, tiles, stok, sw, pos, meta);
  }
}

[[kernel, max_total_threads_per_threadgroup(PLACE_THREADS)]] void mm_place_from_offsets(
    constant PlanArgs& args [[buffer(0)]], const device int* ids [[buffer(1)]],
    const device float* weights [[buffer(2)]], const device uint* bcnt [[buffer(3)]],
    const device uint* boff [[buffer(4)]], device uint* eoff [[buffer(5)]], device uint4* tiles [[buffer(6)]],
    device int* stok [[buffer(7)]], device float* sw [[buffer(8)]], device int* pos [[buffer(9)]],
    device uint* meta [[buffer(10)]], uint thread_index [[thread_index_in_threadgroup]],
    uint group [[threadgroup_position_in_grid]], uint n_groups [[threadgroups_per_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]) {
  threadgroup uint partial[128];
  threadgroup uint4 pool[PLAN_POOL];
  const PlacePart part = plan_read_part(args, ids, weights, thread_index, group, n_groups);
  plan_clear_place(args.n_experts, thread_index, pool);
  const uint same = PLAN_AHEAD ? plan_match_part(args, part, lane, simd, pool) : 0u;
  await_inputs();
  if (args.n_experts <= PLACE_THREADS) {
    uint counts[1], before[1];
    plan_owned_offsets<1>(args, bcnt, boff, part.block, thread_index, counts, before);
    plan_place_behind<1>(args, part, same, counts, before, thread_index, group, n_groups, lane, simd, partial, pool,
                         eoff, tiles, stok, sw, pos, meta);
  } else {
    uint counts[PLACE_OWNED], before[PLACE_OWNED];
    plan_owned_offsets<PLACE_OWNED>(args, bcnt, boff, part.block, thread_index, counts, before);
    plan_place_behind<PLACE_OWNED>(args, part, same, counts, before, thread_index, group, n_groups, lane, simd, partial,
                                   pool, eoff, tiles, stok, sw, pos, meta);
  }
}

// All of it in one launch, for few entries: every threadgroup counts all of them itself, then places its part of a
// block as the place kernels do. Threadgroup memory: a word an expert, its entries in the low half and those before the
// part in the high one, then its next row; half a word an expert, its entries in the part's block; the rank's words.
METAL_FUNC void plan_count_entry(constant PlanArgs& args, uint id, uint entry, uint part_first, bool with_block,
                                 uint block, threadgroup atomic_uint* totals, threadgroup atomic_uint* block_counts) {
  if (id < args.n_experts) {
    atomic_fetch_add_explicit(&totals[id], entry < part_first ? 0x10001u : 1u, memory_order_relaxed);
    if (with_block && entry / EXPERTILE_BLOCK_ENTRIES == block) {
      atomic_fetch_add_explicit(&block_counts[id / 2], id % 2 == 0 ? 1u : 0x10000u, memory_order_relaxed);
    }
  }
}

// Four ids a thread, from `first` on; ~0 past the last entry.
METAL_FUNC void plan_read_four(constant PlanArgs& args, const device int* ids, uint first, thread uint* four) {
  for (uint i = 0; i < 4; ++i) {
    const uint entry = first + i * PLACE_THREADS;
    four[i] = entry < args.n_entries ? uint(ids[entry]) : ~0u;
  }
}

template <uint OWNED>
METAL_FUNC void plan_take_totals(constant PlanArgs& args, uint thread_index, threadgroup uint* totals,
                                 thread uint* counts, thread uint* before) {
  uint first;
  const uint owned = plan_owned<PLACE_THREADS>(args, thread_index, first);
  for (uint j = 0; j < OWNED; ++j) {
    const uint both = j < owned ? totals[first + j] : 0u;
    counts[j] = both & 0xffffu;
    before[j] = both >> 16;
    if (j < owned) {
      totals[first + j] = 0;
    }
  }
}

[[kernel, max_total_threads_per_threadgroup(PLACE_THREADS)]] void mm_single(
    constant PlanArgs& args [[buffer(0)]], const device int* ids [[buffer(1)]],
    const device float* weights [[buffer(2)]], device uint* bcnt [[buffer(3)]], device uint* eoff [[buffer(4)]],
    device uint4* tiles [[buffer(5)]], device int* stok [[buffer(6)]], device float* sw [[buffer(7)]],
    device int* pos [[buffer(8)]], device uint* meta [[buffer(9)]], uint thread_index [[thread_index_in_threadgroup]],
    uint group [[threadgroup_position_in_grid]], uint n_groups [[threadgroups_per_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]) {
  threadgroup uint partial[128];
  threadgroup uint4 pool[PLAN_POOL];
  const uint n_experts = args.n_experts;
  const uint total_words = plan_div_up(n_experts, 4u);
  const uint word_start = total_words + plan_div_up(n_experts, 8u);
  threadgroup uint* next_row = reinterpret_cast<threadgroup uint*>(pool);
  threadgroup atomic_uint* totals = reinterpret_cast<threadgroup atomic_uint*>(pool);
  threadgroup atomic_uint* block_counts = reinterpret_cast<threadgroup atomic_uint*>(pool + total_words);
  threadgroup uint4* words = pool + word_start;
  const bool counted = word_start + PLACE_SUBS / 16 * n_experts <= PLAN_POOL;

  for (uint i = thread_index; i < word_start + (counted ? PLACE_SUBS / 16 * n_experts : 0u); i += PLACE_THREADS) {
    pool[i] = uint4(0u, 0u, 0u, 0u);
  }
  await_inputs();
  const PlacePart part = plan_read_part<false>(args, ids, weights, thread_index, group, n_groups);
  uint four[4];
  plan_read_four(args, ids, thread_index, four);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  // The threadgroup of a block's first part reports the block's counts.
  const bool with_block = part.skipped == 0 && part.block < args.n_blocks;
  const uint part_first = part.block * EXPERTILE_BLOCK_ENTRIES + part.skipped;
  for (uint first = thread_index; first < args.n_entries; first += 4 * PLACE_THREADS) {
    if (first != thread_index) {
      plan_read_four(args, ids, first, four);
    }
    for (uint i = 0; i < 4; ++i) {
      plan_count_entry(args, four[i], first + i * PLACE_THREADS, part_first, with_block, part.block, totals,
                       block_counts);
    }
  }
  const uint expert = min(part.id, n_experts);
  const uint same = plan_match(expert, n_experts);
  plan_publish<PLACE_SUBS>(expert, same, n_experts, counted, lane, simd, words);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (with_block) {
    device uint* row = bcnt + ulong(part.block) * n_experts;
    for (uint e = thread_index; e < n_experts; e += PLACE_THREADS) {
      const uint two = atomic_load_explicit(&block_counts[e / 2], memory_order_relaxed);
      row[e] = e % 2 == 0 ? two & 0xffffu : two >> 16;
    }
  }
  if (n_experts <= PLACE_THREADS) {
    uint counts[1], before[1];
    plan_take_totals<1>(args, thread_index, next_row, counts, before);
    plan_place_part<1>(args, part, counts, before, same, counted, thread_index, group, n_groups, lane, simd, partial,
                       next_row, words, eoff, tiles, stok, sw, pos, meta);
  } else {
    uint counts[PLACE_OWNED], before[PLACE_OWNED];
    plan_take_totals<PLACE_OWNED>(args, thread_index, next_row, counts, before);
    plan_place_part<PLACE_OWNED>(args, part, counts, before, same, counted, thread_index, group, n_groups, lane, simd,
                                 partial, next_row, words, eoff, tiles, stok, sw, pos, meta);
  }
}
