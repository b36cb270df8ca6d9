#include "devices/cpu/plan_rows.h"

#include <algorithm>
#include <bit>

namespace expertile::plan_rows {
namespace {

using Long2 = u64 __attribute__((vector_size(16)));

static_assert(std::endian::native == std::endian::little, "pairs are taken apart by shifts");

constexpr u64 kPaddingPair = 0xFFFFFFFFu;  // token -1, weight +0

// Out of line: in the loop over fours its registers are worth more than its calls.
[[gnu::noinline]] void place_singly(const Entries& entries, u32 n_experts, std::size_t from, std::size_t to, Int4 token,
                                    u32* next) {
  for (std::size_t i = from; i < to; ++i) {
    const u32 expert = static_cast<u32>(entries.ids[i]);
    i32 row = -1;
    if (expert < n_experts) {
      row = static_cast<i32>(next[expert]++);
      entries.pairs[row] = u64{load<u32>(entries.weights + i)} << 32 | static_cast<u32>(token[i - from]);
    }
    entries.position[i] = row;
  }
}

template <bool checked>
void place(const PlanArgs& a, const Entries& entries, std::size_t from, std::size_t to, u32* __restrict next) {
  const i32* __restrict ids = entries.ids;
  const float* __restrict weights = entries.weights;
  i32* __restrict position = entries.position;
  u64* __restrict pairs = entries.pairs;
  const u32 n_experts = a.n_experts;
  const std::size_t begin = from * kBlock, end = std::min<std::size_t>(a.n_entries, to * kBlock);
  const i32 k = static_cast<i32>(a.top_k), token_step = 4 / k, slot_step = 4 % k;
  Int4 token{}, slot{};
  for (std::size_t j = 0; j < 4; ++j) {
    token[j] = static_cast<i32>((begin + j) / a.top_k);
    slot[j] = static_cast<i32>((begin + j) % a.top_k);
  }
  std::size_t i = begin;
  for (; i + 4 <= end; i += 4) {
    const u64 low = load<u64>(ids + i), high = load<u64>(ids + i + 2);
    const u32 e0 = static_cast<u32>(low), e1 = static_cast<u32>(low >> 32);
    const u32 e2 = static_cast<u32>(high), e3 = static_cast<u32>(high >> 32);
    if (!checked || (e0 < n_experts && e1 < n_experts && e2 < n_experts && e3 < n_experts)) [[likely]] {
      const u32 r0 = next[e0]++, r1 = next[e1]++, r2 = next[e2]++, r3 = next[e3]++;
      const Int4 rows = {static_cast<i32>(r0), static_cast<i32>(r1), static_cast<i32>(r2), static_cast<i32>(r3)};
      std::memcpy(position + i, &rows, sizeof(rows));
      const Int4 weight = load<Int4>(weights + i);
      const auto first = std::bit_cast<Long2>(__builtin_shufflevector(token, weight, 0, 4, 1, 5));
      const auto second = std::bit_cast<Long2>(__builtin_shufflevector(token, weight, 2, 6, 3, 7));
      pairs[r0] = first[0];
      pairs[r1] = first[1];
      pairs[r2] = second[0];
      pairs[r3] = second[1];
    } else {
      place_singly(entries, n_experts, i, i + 4, token, next);
    }
    const Int4 wraps = slot + slot_step >= k;  // -1 where the next slot is one of the next token
    token = token + token_step - wraps;
    slot = slot + slot_step - (wraps & k);
  }
  place_singly(entries, n_experts, i, end, token, next);
}

}  // namespace

void place_blocks(const PlanArgs& a, const Entries& entries, std::size_t from, std::size_t to, u32* next) {
  place<true>(a, entries, from, to, next);
}

void place_kept(const PlanArgs& a, const Entries& entries, std::size_t from, std::size_t to, u32* next) {
  place<false>(a, entries, from, to, next);
}

void pad_pairs(const PlanArgs& a, const u32* expert_offset, u64* pairs) {
  const Long2 two = {kPaddingPair, kPaddingPair};
  for (u32 e = 0; e < a.n_experts; ++e) {
    const u32 end = expert_offset[e + 1];
    if (end == expert_offset[e]) continue;
    u32 row = end - a.tile_rows;
    for (; row + 2 <= end; row += 2) std::memcpy(pairs + row, &two, sizeof(two));
    if (row < end) pairs[row] = kPaddingPair;
  }
}

void split_pairs(const u64* __restrict pairs, std::size_t from, std::size_t to, RowArrays rows) {
  std::size_t r = from;
  for (; r + 4 <= to; r += 4) {
    const Int4 low = load<Int4>(pairs + r), high = load<Int4>(pairs + r + 2);
    const Int4 tokens = __builtin_shufflevector(low, high, 0, 2, 4, 6);
    const Int4 weights = __builtin_shufflevector(low, high, 1, 3, 5, 7);
    std::memcpy(rows.token + r, &tokens, sizeof(tokens));
    std::memcpy(rows.weight + r, &weights, sizeof(weights));
  }
  for (; r < to; ++r) {
    const u32 words[2] = {static_cast<u32>(pairs[r]), static_cast<u32>(pairs[r] >> 32)};
    std::memcpy(rows.token + r, &words[0], 4);
    std::memcpy(rows.weight + r, &words[1], 4);
  }
}

}  // namespace expertile::plan_rows
