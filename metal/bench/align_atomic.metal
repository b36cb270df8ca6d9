// align_atomic.metal: the plan as GPU inference servers commonly make it, to measure ours against. For benches only.
//
// Two launches: one threadgroup counts all entries with atomics and scans the experts' padded offsets while another one
// fills the rows; then every entry takes the next row of its expert by an atomic. So the order inside an expert is not
// stable, and there are no weights, no positions and no real rows a tile. Written from the public description of
// vLLM's moe_align_block_size.
//
//   ids    next           tile_expert      row_entry     n_rows
//   T*K    E              max_rows / M     max_rows      1
#include "plan_common.h"

[[kernel, max_total_threads_per_threadgroup(PLAN_THREADS)]] void align_count(
    constant PlanArgs& args [[buffer(0)]], const device int* ids [[buffer(1)]], device uint* next [[buffer(2)]],
    device int* tile_expert [[buffer(3)]], device int* row_entry [[buffer(4)]], device uint* n_rows [[buffer(5)]],
    uint thread_index [[thread_index_in_threadgroup]], uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]) {
  threadgroup uint partial[128];
  threadgroup atomic_uint counts[PLAN_MAX_EXPERTS];
  if (group == 1) {
    for (uint row = thread_index; row < args.max_rows; row += PLAN_THREADS) {
      row_entry[row] = int(args.n_entries);
    }
    return;
  }
  for (uint e = thread_index; e < args.n_experts; e += PLAN_THREADS) {
    atomic_store_explicit(&counts[e], 0u, memory_order_relaxed);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint entry = thread_index; entry < args.n_entries; entry += PLAN_THREADS) {
    const uint expert = plan_expert(args, ids, entry);
    if (expert < args.n_experts) {
      atomic_fetch_add_explicit(&counts[expert], 1u, memory_order_relaxed);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint first;
  const uint owned = plan_owned(args, thread_index, first);
  uint mine[PLAN_OWNED];
  for (uint j = 0; j < PLAN_OWNED; ++j) {
    mine[j] = j < owned ? atomic_load_explicit(&counts[first + j], memory_order_relaxed) : 0u;
  }
  PlanTotals all;
  uint tile = plan_scan(plan_totals(mine, PLAN_OWNED, args.tile_rows), true, lane, simd, partial, all);
  for (uint j = 0; j < owned; ++j) {
    next[first + j] = tile * args.tile_rows;
    const uint end = tile + plan_div_up(mine[j], args.tile_rows);
    for (; tile < end; ++tile) {
      tile_expert[tile] = int(first + j);
    }
  }
  if (thread_index == 0) {
    n_rows[0] = all.tiles * args.tile_rows;
  }
}

[[kernel, max_total_threads_per_threadgroup(256)]] void align_sort(constant PlanArgs& args [[buffer(0)]],
                                                                   const device int* ids [[buffer(1)]],
                                                                   device atomic_uint* next [[buffer(2)]],
                                                                   device int* row_entry [[buffer(3)]],
                                                                   uint thread_index [[thread_index_in_threadgroup]],
                                                                   uint group [[threadgroup_position_in_grid]]) {
  const uint entry = group * 256 + thread_index;
  const uint expert = plan_expert(args, ids, entry);
  if (expert < args.n_experts) {
    row_entry[atomic_fetch_add_explicit(&next[expert], 1u, memory_order_relaxed)] = int(entry);
  }
}
