// plan.metal: the plan: a stable counting sort of the chunk's entries by expert, each expert's rows padded to tiles.
//
//   position[i] = expert_offset[e] + #{j < i : ids[j] = e},  e = ids[i];   row_token[position[i]] = i / K
//
//   ids     bcnt           boff          eoff    tiles            stok, sw          pos     meta
//   T*K     n_blocks, E    n_blocks, E   E + 1   max_rows / M     max_rows          T*K     14
//
// Fed by route_topk (ids, weights); feeds mm_gather, the grouped GEMMs and mm_combine. A block is 1,024 entries.
// Variants: baseline = mm_clear || mm_hist, mm_scan, mm_place; padscan = mm_hist, mm_scan_pad, mm_place_two_level.
#include "plan_common.h"

// Every row as if it were padding: the baseline's scan leaves those rows alone.
[[kernel, max_total_threads_per_threadgroup(256)]] void mm_clear(constant PlanArgs& args [[buffer(0)]],
                                                                 device int* stok [[buffer(1)]],
                                                                 device float* sw [[buffer(2)]],
                                                                 uint thread_index [[thread_index_in_threadgroup]],
                                                                 uint group [[threadgroup_position_in_grid]]) {
  const uint row = group * 256 + thread_index;
  if (row < args.max_rows) {
    stok[row] = -1;
    sw[row] = 0.0f;
  }
}

// bcnt[b, e]: entries of expert e in block b. A threadgroup a block.
[[kernel, max_total_threads_per_threadgroup(PLAN_THREADS)]] void mm_hist(
    constant PlanArgs& args [[buffer(0)]], const device int* ids [[buffer(1)]], device uint* bcnt [[buffer(2)]],
    uint thread_index [[thread_index_in_threadgroup]], uint block [[threadgroup_position_in_grid]]) {
  threadgroup atomic_uint counts[PLAN_MAX_EXPERTS];
  for (uint e = thread_index; e < args.n_experts; e += PLAN_THREADS) {
    atomic_store_explicit(&counts[e], 0u, memory_order_relaxed);
  }
  await_inputs();
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint expert = plan_expert(args, ids, block * EXPERTILE_BLOCK_ENTRIES + thread_index);
  if (expert < args.n_experts) {
    atomic_fetch_add_explicit(&counts[expert], 1u, memory_order_relaxed);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  device uint* row = bcnt + ulong(block) * args.n_experts;
  for (uint e = thread_index; e < args.n_experts; e += PLAN_THREADS) {
    row[e] = atomic_load_explicit(&counts[e], memory_order_relaxed);
  }
}

// boff of one expert: its entries in earlier blocks. Returns all of them. Eight loads go ahead of their stores.
METAL_FUNC uint plan_walk_blocks(const device uint* bcnt, device uint* boff, uint expert, ulong stride, uint n_blocks) {
  uint sum = 0;
  uint block = 0;
  for (; block + 8 <= n_blocks; block += 8) {
    uint counts[8];
    for (uint i = 0; i < 8; ++i) {
      counts[i] = bcnt[(block + i) * stride + expert];
    }
    for (uint i = 0; i < 8; ++i) {
      boff[(block + i) * stride + expert] = sum;
      sum += counts[i];
    }
  }
  for (; block < n_blocks; ++block) {
    const uint count = bcnt[block * stride + expert];
    boff[block * stride + expert] = sum;
    sum += count;
  }
  return sum;
}

METAL_FUNC void plan_count_owned(constant PlanArgs& args, const device uint* bcnt, device uint* boff, uint thread_index,
                                 thread uint* counts) {
  uint first;
  const uint owned = plan_owned(args, thread_index, first);
  for (uint j = 0; j < PLAN_OWNED; ++j) {
    counts[j] = j < owned ? plan_walk_blocks(bcnt, boff, first + j, args.n_experts, args.n_blocks) : 0u;
  }
}

// From the counts of the blocks to offsets, tiles and meta. One threadgroup.
[[kernel, max_total_threads_per_threadgroup(PLAN_THREADS)]] void mm_scan(
    constant PlanArgs& args [[buffer(0)]], const device uint* bcnt [[buffer(1)]], device uint* boff [[buffer(2)]],
    device uint* eoff [[buffer(3)]], device uint4* tiles [[buffer(4)]], device uint* meta [[buffer(5)]],
    uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simd [[simdgroup_index_in_threadgroup]]) {
  threadgroup uint partial[128];
  threadgroup uint tile_start[PLAN_MAX_EXPERTS + 1];
  threadgroup ushort last_rows[PLAN_MAX_EXPERTS];
  uint counts[PLAN_OWNED];
  plan_count_owned(args, bcnt, boff, thread_index, counts);
  plan_finish(args, counts, thread_index, lane, simd, partial, tile_start, last_rows, eoff, tiles, meta);
}

// mm_scan, and the padding rows too: nothing then needs clearing.
[[kernel, max_total_threads_per_threadgroup(PLAN_THREADS)]] void mm_scan_pad(
    constant PlanArgs& args [[buffer(0)]], const device uint* bcnt [[buffer(1)]], device uint* boff [[buffer(2)]],
    device uint* eoff [[buffer(3)]], device uint4* tiles [[buffer(4)]], device int* stok [[buffer(5)]],
    device float* sw [[buffer(6)]], device uint* meta [[buffer(7)]], uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]) {
  threadgroup uint partial[128];
  threadgroup uint tile_start[PLAN_MAX_EXPERTS + 1];
  threadgroup ushort last_rows[PLAN_MAX_EXPERTS];
  uint counts[PLAN_OWNED];
  plan_count_owned(args, bcnt, boff, thread_index, counts);
  plan_finish(args, counts, thread_index, lane, simd, partial, tile_start, last_rows, eoff, tiles, meta);
  plan_pad(args, tile_start, last_rows, lane, simd, stok, sw);
}

// Entries to their rows, the rank inside a block by looking at every entry before. A threadgroup a block.
[[kernel, max_total_threads_per_threadgroup(PLAN_THREADS)]] void mm_place(
    constant PlanArgs& args [[buffer(0)]], const device int* ids [[buffer(1)]],
    const device float* weights [[buffer(2)]], const device uint* boff [[buffer(3)]],
    const device uint* eoff [[buffer(4)]], device int* stok [[buffer(5)]], device float* sw [[buffer(6)]],
    device int* pos [[buffer(7)]], uint thread_index [[thread_index_in_threadgroup]],
    uint block [[threadgroup_position_in_grid]]) {
  threadgroup uint experts[PLAN_THREADS];
  const uint entry = block * EXPERTILE_BLOCK_ENTRIES + thread_index;
  const uint expert = plan_expert(args, ids, entry);
  const float weight = plan_weight(args, weights, expert, entry);
  experts[thread_index] = expert;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint row = 0;
  if (expert < args.n_experts) {
    for (uint j = 0; j < thread_index; ++j) {
      row += experts[j] == expert ? 1u : 0u;
    }
    row += eoff[expert] + boff[ulong(block) * args.n_experts + expert];
  }
  plan_put(args, expert, weight, entry, row, stok, sw, pos);
}

// mm_place with the rank of plan_rank.
[[kernel, max_total_threads_per_threadgroup(PLAN_THREADS)]] void mm_place_two_level(
    constant PlanArgs& args [[buffer(0)]], const device int* ids [[buffer(1)]],
    const device float* weights [[buffer(2)]], const device uint* boff [[buffer(3)]],
    const device uint* eoff [[buffer(4)]], device int* stok [[buffer(5)]], device float* sw [[buffer(6)]],
    device int* pos [[buffer(7)]], uint thread_index [[thread_index_in_threadgroup]],
    uint block [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
    uint simd [[simdgroup_index_in_threadgroup]]) {
  threadgroup uint4 words[PLAN_POOL];
  const bool counted = plan_counted<32>(args.n_experts);
  if (counted) {
    plan_clear_counts<32>(args.n_experts, thread_index, words);
  }
  const uint entry = block * EXPERTILE_BLOCK_ENTRIES + thread_index;
  const uint expert = plan_expert(args, ids, entry);
  const float weight = plan_weight(args, weights, expert, entry);
  uint row = 0;
  if (expert < args.n_experts) {
    row = eoff[expert] + boff[ulong(block) * args.n_experts + expert];
  }
  const uint same = plan_match(expert, args.n_experts);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  plan_publish<32>(expert, same, args.n_experts, counted, lane, simd, words);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  row += plan_rank<32>(expert, same, args.n_experts, counted, lane, simd, words);
  plan_put(args, expert, weight, entry, row, stok, sw, pos);
}
