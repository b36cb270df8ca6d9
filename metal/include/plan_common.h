// plan_common.h: what the plan kernels share: reading an entry's expert, the scan over a threadgroup of 1,024, the rank
// of an entry inside its block, and the end of every scan (offsets, tiles, meta, padding rows).
//
// A thread owns PLAN_OWNED neighbouring experts at most: expert `first + j`, j < owned (plan_owned).
#pragma once
#include <metal_stdlib>

#include "args.h"

using namespace metal;

#define PLAN_THREADS 1024
#define PLAN_MAX_EXPERTS 4096
#define PLAN_OWNED 4       // PLAN_MAX_EXPERTS / PLAN_THREADS
#define PLAN_RANK_WORDS 4  // uint4 words of a sub-block: 16 bits, enough for experts 0..4096
#define PLAN_POOL 1856  // uint4 words of a place kernel's threadgroup memory: the next row of each expert, then ranks

struct PlanTotals {
  uint tiles;
  uint kept;
  uint active;
  uint largest;
};

// Ahead of it a kernel clears threadgroup memory and reads what earlier launches than the last wrote: CUDA waits here,
// and launches such a kernel early only where the last writes none of the buffers that are named ahead of it.
#if defined(EXPERTILE_CUDA)
#define PLAN_AHEAD true
#else
#define PLAN_AHEAD false  // then loads are better on their way before the work that they wait behind
METAL_FUNC void await_inputs() {}
#endif

METAL_FUNC uint plan_div_up(uint a, uint b) { return (a + b - 1u) / b; }

// The expert of an entry; n_experts where it is skipped: -1, any other id outside 0..E-1, or past the last entry.
METAL_FUNC uint plan_expert(constant PlanArgs& args, const device int* ids, uint entry) {
  if (entry >= args.n_entries) {
    return args.n_experts;
  }
  return min(uint(ids[entry]), args.n_experts);
}

// Experts that a thread owns; `first` is the first of them.
template <uint THREADS = PLAN_THREADS>
METAL_FUNC uint plan_owned(constant PlanArgs& args, uint thread_index, thread uint& first) {
  const uint share = plan_div_up(args.n_experts, THREADS);
  first = thread_index * share;
  return first < args.n_experts ? min(share, args.n_experts - first) : 0u;
}

// Sum of one expert's counts over n_blocks blocks; `before` gets the part of the blocks before `middle`. FLIGHT loads
// are on their way at once: the walk is bound by latency.
template <uint FLIGHT = 8>
METAL_FUNC uint plan_sum_blocks(const device uint* column, ulong stride, uint n_blocks, uint middle,
                                thread uint& before) {
  uint sum = 0;
  before = 0;
  for (uint block = 0; block < n_blocks; block += FLIGHT) {
    uint counts[FLIGHT];
    for (uint i = 0; i < FLIGHT; ++i) {
      counts[i] = block + i < n_blocks ? column[(block + i) * stride] : 0u;
    }
    for (uint i = 0; i < FLIGHT; ++i) {
      sum += counts[i];
      before += block + i < middle ? counts[i] : 0u;
    }
  }
  return sum;
}

// Exclusive scan of `mine.tiles` over the threadgroup (the return value), and their sum in all.tiles; with `every` the
// other three too (the last a maximum). `partial` holds 4 * 32 words; every thread must call, once a kernel.
template <uint THREADS = PLAN_THREADS>
METAL_FUNC uint plan_scan(PlanTotals mine, bool every, uint lane, uint simd, threadgroup uint* partial,
                          thread PlanTotals& all) {
  const uint before = simd_prefix_exclusive_sum(mine.tiles);
  if (lane == 31) {
    partial[simd] = before + mine.tiles;
  }
  if (every) {
    const uint kept = simd_sum(mine.kept);
    const uint active = simd_sum(mine.active);
    const uint largest = simd_max(mine.largest);
    if (lane == 31) {
      partial[32 + simd] = kept;
      partial[64 + simd] = active;
      partial[96 + simd] = largest;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const bool present = lane < THREADS / 32;
  const uint tiles = present ? partial[lane] : 0u;
  const uint offset = simd_shuffle(simd_prefix_exclusive_sum(tiles), ushort(simd));
  all.tiles = simd_sum(tiles);
  all.kept = every ? simd_sum(present ? partial[32 + lane] : 0u) : 0u;
  all.active = every ? simd_sum(present ? partial[64 + lane] : 0u) : 0u;
  all.largest = every ? simd_max(present ? partial[96 + lane] : 0u) : 0u;
  return offset + before;
}

// Of the counts of `share` experts at most, out of OWNED.
template <uint OWNED = PLAN_OWNED>
METAL_FUNC PlanTotals plan_totals(thread const uint* counts, uint share, uint tile_rows) {
  PlanTotals mine = {0, 0, 0, 0};
  for (uint j = 0; j < OWNED; ++j) {
    if (j < share) {
      mine.tiles += plan_div_up(counts[j], tile_rows);
      mine.kept += counts[j];
      mine.active += counts[j] > 0 ? 1u : 0u;
      mine.largest = max(mine.largest, counts[j]);
    }
  }
  return mine;
}

METAL_FUNC void plan_write_meta(constant PlanArgs& args, PlanTotals all, device uint* meta) {
  const uint rows = all.tiles * args.tile_rows;
  meta[EXPERTILE_META_ROWS] = rows;
  meta[EXPERTILE_META_TILES] = all.tiles;
  meta[EXPERTILE_META_KEPT] = all.kept;
  meta[EXPERTILE_META_ACTIVE] = all.active;
  meta[EXPERTILE_META_LARGEST] = all.largest;
  meta[EXPERTILE_META_GRID_ROWS] = max(rows, 1u);
  meta[EXPERTILE_META_GRID_ROWS + 1] = 1;
  meta[EXPERTILE_META_GRID_ROWS + 2] = 1;
  meta[EXPERTILE_META_GRID_GATE_UP] = max(args.gate_up_columns, 1u);
  meta[EXPERTILE_META_GRID_GATE_UP + 1] = max(all.tiles, 1u);
  meta[EXPERTILE_META_GRID_GATE_UP + 2] = 1;
  meta[EXPERTILE_META_GRID_DOWN] = max(args.down_columns, 1u);
  meta[EXPERTILE_META_GRID_DOWN + 1] = max(all.tiles, 1u);
  meta[EXPERTILE_META_GRID_DOWN + 2] = 1;
}

// The end of a scan by one threadgroup: from the counts of each thread's experts (0 beyond those owned) to eoff, tiles
// and meta. Leaves tile_start[0..E] (first tile of each expert) and last_rows[e] (real rows of its last tile) behind.
METAL_FUNC void plan_finish(constant PlanArgs& args, thread const uint* counts, uint thread_index, uint lane, uint simd,
                            threadgroup uint* partial, threadgroup uint* tile_start, threadgroup ushort* last_rows,
                            device uint* eoff, device uint4* tiles, device uint* meta) {
  uint first;
  const uint owned = plan_owned(args, thread_index, first);
  PlanTotals all;
  uint tile = plan_scan(plan_totals(counts, PLAN_OWNED, args.tile_rows), true, lane, simd, partial, all);
  for (uint j = 0; j < owned; ++j) {
    const uint n_tiles = plan_div_up(counts[j], args.tile_rows);
    tile_start[first + j] = tile;
    last_rows[first + j] = ushort(n_tiles > 0 ? counts[j] - (n_tiles - 1) * args.tile_rows : 0u);
    eoff[first + j] = tile * args.tile_rows;
    tile += n_tiles;
  }
  if (thread_index == 0) {
    tile_start[args.n_experts] = all.tiles;
    eoff[args.n_experts] = all.tiles * args.tile_rows;
    plan_write_meta(args, all, meta);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  // A thread a tile, its expert by bisection: one busy expert does not leave its tiles to one thread.
  for (uint t = thread_index; t < all.tiles; t += PLAN_THREADS) {
    uint expert = 0;
    uint beyond = args.n_experts;
    while (beyond - expert > 1) {
      const uint middle = (expert + beyond) / 2;
      if (tile_start[middle] <= t) {
        expert = middle;
      } else {
        beyond = middle;
      }
    }
    const bool last = t + 1 == tile_start[expert + 1];
    tiles[t] = uint4(expert, t * args.tile_rows, last ? uint(last_rows[expert]) : args.tile_rows, 0u);
  }
}

// -1 and +0 into the padding rows, a simdgroup an expert. After plan_finish.
METAL_FUNC void plan_pad(constant PlanArgs& args, const threadgroup uint* tile_start,
                         const threadgroup ushort* last_rows, uint lane, uint simd, device int* stok,
                         device float* sw) {
  for (uint expert = simd; expert < args.n_experts; expert += PLAN_THREADS / 32) {
    const uint end = tile_start[expert + 1];
    if (end > tile_start[expert]) {
      const uint row = (end - 1) * args.tile_rows;
      for (uint j = last_rows[expert] + lane; j < args.tile_rows; j += 32) {
        stok[row + j] = -1;
        sw[row + j] = 0.0f;
      }
    }
  }
}

METAL_FUNC uint plan_ballot(uint bit) { return uint(simd_vote::vote_t(simd_ballot(bit != 0))); }

// The rank of an entry: how many entries before it among those of a threadgroup name the same expert, in two levels. A
// sub-block is one simdgroup's 32 entries. Inside it the lanes are matched bit by bit (plan_match); across sub-blocks
// the counts of each are published in threadgroup memory, a barrier passes, and the earlier ones are added up.
//
// `words`, counted: a byte a sub-block for every expert, SUBS of them in SUBS / 16 uint4, cleared a barrier before.
// Where those do not fit: bit l of word b of a sub-block is bit b of the expert of its lane l (PLAN_RANK_WORDS uint4 a
// sub-block); the entries of expert e are then the AND of the words, those of e's zero bits inverted. Neither can
// overflow.
template <uint SUBS>
METAL_FUNC bool plan_counted(uint n_experts) {
  return plan_div_up(n_experts, 4u) + SUBS / 16 * n_experts <= PLAN_POOL;
}

template <uint SUBS>
METAL_FUNC void plan_clear_counts(uint n_experts, uint thread_index, threadgroup uint4* words) {
  for (uint i = thread_index; i < SUBS / 16 * n_experts; i += SUBS * 32) {
    words[i] = uint4(0u, 0u, 0u, 0u);
  }
}

// Lanes of the simdgroup whose entries name this lane's expert (n_experts = skipped is a value like another).
METAL_FUNC uint plan_match(uint expert, uint n_experts) {
  const uint n_bits = 32u - clz(n_experts);
  uint same = ~0u;
  for (uint b = 0; b < n_bits; ++b) {
    const uint bit = (expert >> b) & 1u;
    same &= plan_ballot(bit) ^ (bit - 1u);
  }
  return same;
}

template <uint SUBS>
METAL_FUNC void plan_publish_counts(uint expert, uint same, uint n_experts, uint lane, uint simd,
                                    threadgroup uint4* words) {
  if (expert < n_experts && (same & ((1u << lane) - 1u)) == 0) {
    reinterpret_cast<threadgroup uchar*>(words)[expert * SUBS + simd] = uchar(popcount(same));
  }
}

METAL_FUNC void plan_publish_bits(uint expert, uint n_experts, uint lane, uint simd, threadgroup uint4* words) {
  const uint n_words = (35u - clz(n_experts)) / 4u;
  for (uint w = 0; w < n_words; ++w) {
    const uint4 word = uint4(plan_ballot((expert >> (4 * w)) & 1u), plan_ballot((expert >> (4 * w + 1)) & 1u),
                             plan_ballot((expert >> (4 * w + 2)) & 1u), plan_ballot((expert >> (4 * w + 3)) & 1u));
    if (lane == 0) {
      words[PLAN_RANK_WORDS * simd + w] = word;
    }
  }
}

// The bytes of `word`, sub-blocks first .. first + 3, that lie before sub-block `simd`, as two sums of 16 bits.
METAL_FUNC uint plan_sum_bytes(uint word, uint first, uint simd) {
  const uint before = simd > first ? simd - first : 0u;
  const uint kept = before >= 4 ? word : word & ((1u << (8 * before)) - 1u);
  return (kept & 0x00ff00ffu) + ((kept >> 8) & 0x00ff00ffu);
}

template <uint SUBS>
METAL_FUNC uint plan_rank_of_counts(uint expert, uint simd, threadgroup const uint4* words) {
  uint sums = 0;
  for (uint i = 0; i < SUBS / 16; ++i) {
    const uint4 some = words[SUBS / 16 * expert + i];
    sums += plan_sum_bytes(some.x, 16 * i, simd) + plan_sum_bytes(some.y, 16 * i + 4, simd) +
            plan_sum_bytes(some.z, 16 * i + 8, simd) + plan_sum_bytes(some.w, 16 * i + 12, simd);
  }
  return (sums & 0xffffu) + (sums >> 16);
}

METAL_FUNC uint plan_rank_of_bits(uint expert, uint n_experts, uint simd, threadgroup const uint4* words) {
  const uint n_words = (35u - clz(n_experts)) / 4u;
  uint invert[4 * PLAN_RANK_WORDS];
  for (uint b = 0; b < 4 * PLAN_RANK_WORDS; ++b) {
    invert[b] = ((expert >> b) & 1u) - 1u;
  }
  uint rank = 0;
  for (uint s = 0; s < simd; ++s) {
    uint match = ~0u;
    for (uint w = 0; w < PLAN_RANK_WORDS; ++w) {
      if (w < n_words) {
        const uint4 word = words[PLAN_RANK_WORDS * s + w];
        match &= (word.x ^ invert[4 * w]) & (word.y ^ invert[4 * w + 1]) & (word.z ^ invert[4 * w + 2]) &
                 (word.w ^ invert[4 * w + 3]);
      }
    }
    rank += popcount(match);
  }
  return rank;
}

// Before the barrier ...
template <uint SUBS>
METAL_FUNC void plan_publish(uint expert, uint same, uint n_experts, bool counted, uint lane, uint simd,
                             threadgroup uint4* words) {
  if (counted) {
    plan_publish_counts<SUBS>(expert, same, n_experts, lane, simd, words);
  } else {
    plan_publish_bits(expert, n_experts, lane, simd, words);
  }
}

// ... and behind it. Of a skipped entry it is without meaning.
template <uint SUBS>
METAL_FUNC uint plan_rank(uint expert, uint same, uint n_experts, bool counted, uint lane, uint simd,
                          threadgroup const uint4* words) {
  const uint inside = popcount(same & ((1u << lane) - 1u));
  if (expert >= n_experts) {
    return 0;
  }
  return inside +
         (counted ? plan_rank_of_counts<SUBS>(expert, simd, words) : plan_rank_of_bits(expert, n_experts, simd, words));
}

// The weight of an entry that is kept, read as early as its expert is known.
METAL_FUNC float plan_weight(constant PlanArgs& args, const device float* weights, uint expert, uint entry) {
  return expert < args.n_experts ? weights[entry] : 0.0f;
}

// One entry to its row, or its position to -1. Nothing for what is past the last entry.
METAL_FUNC void plan_put(constant PlanArgs& args, uint expert, float weight, uint entry, uint row, device int* stok,
                         device float* sw, device int* pos) {
  if (expert < args.n_experts) {
    stok[row] = int(entry / args.top_k);
    sw[row] = weight;
    pos[entry] = int(row);
  } else if (entry < args.n_entries) {
    pos[entry] = -1;
  }
}
