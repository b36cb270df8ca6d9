// plan_rows.h: from entries to rows, the scatter of the native plan.
//
// Entries are scattered as pairs (token, weight) of 8 bytes and the pairs split into the two row arrays afterwards: one
// open cache line and page an expert instead of two. A chunk of blocks first takes its rows, which are its positions,
// and then scatters. Entries go by fours, so that ids, weights and positions move in whole words; four with a skipped
// one among them go singly.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "args.h"

namespace expertile::plan_rows {

using args::PlanArgs;
using u32 = std::uint32_t;
using i32 = std::int32_t;
using u64 = std::uint64_t;
using Int4 = i32 __attribute__((vector_size(16)));
using UInt4 = u32 __attribute__((vector_size(16)));
using Long2 = u64 __attribute__((vector_size(16)));

inline constexpr std::size_t kBlock = EXPERTILE_BLOCK_ENTRIES;

template <class Vector>
Vector load(const void* from) {
  Vector value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

template <class Vector>
void store(void* to, const Vector& value) {
  std::memcpy(to, &value, sizeof(value));
}

struct RowArrays {
  i32* token = nullptr;
  float* weight = nullptr;
};

struct Entries {
  const i32* ids;
  const float* weights;
  i32* position;
  RowArrays rows;
  u64* pairs;
};

inline constexpr u64 kPaddingPair = 0xFFFFFFFFu;  // token -1, weight +0

// Padding into an expert's last tile; the entries then overwrite what is theirs.
inline void pad_tile(u64* pairs, u32 tile_rows) {
  const Long2 two = {kPaddingPair, kPaddingPair};
  u32 row = 0;
  for (; row + 8 <= tile_rows; row += 8) {
    store(pairs + row, two);
    store(pairs + row + 2, two);
    store(pairs + row + 4, two);
    store(pairs + row + 6, two);
  }
  for (; row < tile_rows; ++row) pairs[row] = kPaddingPair;
}

// The entries of blocks from..to-1 to their pairs; `next`: the next row of each expert, at block `from` to begin with.
void place_blocks(const PlanArgs& a, const Entries& entries, std::size_t from, std::size_t to, u32* next);
// The same where the counts say that every entry is kept.
void place_kept(const PlanArgs& a, const Entries& entries, std::size_t from, std::size_t to, u32* next);

// Rows from..to-1 of the pairs into the two arrays.
void split_pairs(const u64* pairs, std::size_t from, std::size_t to, RowArrays rows);

}  // namespace expertile::plan_rows
