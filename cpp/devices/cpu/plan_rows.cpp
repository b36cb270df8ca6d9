#include "devices/cpu/plan_rows.h"

#include <algorithm>
#include <bit>

namespace expertile::plan_rows {
namespace {

using Float4 = float __attribute__((vector_size(16)));

static_assert(std::endian::native == std::endian::little, "pairs are taken apart by shifts");

constexpr std::size_t kChunk = 4 * kBlock;     // its positions stay in the first cache
constexpr u64 kSkipped = 0x8000000080000000u;  // the signs of two positions

// Tokens and slots of the four entries that come next.
struct Cursor {
  Int4 token, slot;

  Cursor(std::size_t first, u32 top_k) {
    for (std::size_t j = 0; j < 4; ++j) {
      token[j] = static_cast<i32>((first + j) / top_k);
      slot[j] = static_cast<i32>((first + j) % top_k);
    }
  }
};

// The next row of an expert. In a vector register: from there it goes into `position` without a transfer.
inline Int4 take_row(u32* next) {
  const Int4 row = std::bit_cast<Int4>(Float4{load<float>(next)});
  const float after = std::bit_cast<Float4>(row + Int4{1})[0];
  store(next, after);
  return row;
}

// The slow ways are out of line: in the loops over fours their registers are worth more than their calls.
[[gnu::noinline]] void take_rows_singly(const Entries& entries, u32 n_experts, std::size_t from, std::size_t to,
                                        u32* next) {
  for (std::size_t i = from; i < to; ++i) {
    const u32 expert = static_cast<u32>(entries.ids[i]);
    entries.position[i] = expert < n_experts ? static_cast<i32>(next[expert]++) : -1;
  }
}

[[gnu::noinline]] void scatter_singly(const Entries& entries, std::size_t from, std::size_t to, Int4 token) {
  for (std::size_t i = from; i < to; ++i) {
    const i32 row = entries.position[i];
    if (row < 0) continue;
    entries.pairs[row] = u64{load<u32>(entries.weights + i)} << 32 | static_cast<u32>(token[i - from]);
  }
}

template <bool checked>
void take_rows(const Entries& entries, u32 n_experts, std::size_t from, std::size_t to, u32* __restrict next) {
  const i32* __restrict ids = entries.ids;
  i32* __restrict position = entries.position;
  const std::size_t fours = to - (to - from) % 4;
  for (std::size_t i = from; i < fours; i += 4) {
    const u64 low = load<u64>(ids + i), high = load<u64>(ids + i + 2);
    const u64 e0 = static_cast<u32>(low), e1 = low >> 32, e2 = static_cast<u32>(high), e3 = high >> 32;
    if (!checked || (e0 < n_experts && e1 < n_experts && e2 < n_experts && e3 < n_experts)) [[likely]] {
      const Int4 r0 = take_row(next + e0), r1 = take_row(next + e1), r2 = take_row(next + e2), r3 = take_row(next + e3);
      const Int4 front = __builtin_shufflevector(r0, r1, 0, 4, 1, 5);
      const Int4 back = __builtin_shufflevector(r2, r3, 0, 4, 1, 5);
      store(position + i, Int4(__builtin_shufflevector(front, back, 0, 1, 4, 5)));
    } else {
      take_rows_singly(entries, n_experts, i, i + 4, next);
    }
  }
  take_rows_singly(entries, n_experts, fours, to, next);
}

template <bool checked>
void scatter(const Entries& entries, i32 top_k, std::size_t from, std::size_t to, Cursor& cursor) {
  const i32* __restrict position = entries.position;
  const float* __restrict weights = entries.weights;
  u64* __restrict pairs = entries.pairs;
  const i32 token_step = 4 / top_k, slot_step = 4 % top_k, last_slot = top_k - 1;
  Int4 token = cursor.token, slot = cursor.slot;
  const std::size_t fours = to - (to - from) % 4;
  for (std::size_t i = from; i < fours; i += 4) {
    const u64 low = load<u64>(position + i), high = load<u64>(position + i + 2);
    if (!checked || ((low | high) & kSkipped) == 0) [[likely]] {
      const Int4 weight = load<Int4>(weights + i);
      const auto first = std::bit_cast<Long2>(__builtin_shufflevector(token, weight, 0, 4, 1, 5));
      const auto second = std::bit_cast<Long2>(__builtin_shufflevector(token, weight, 2, 6, 3, 7));
      pairs[static_cast<u32>(low)] = first[0];
      pairs[low >> 32] = first[1];
      pairs[static_cast<u32>(high)] = second[0];
      pairs[high >> 32] = second[1];
    } else {
      scatter_singly(entries, i, i + 4, token);
    }
    const Int4 next_slot = slot + slot_step;
    const Int4 wraps = next_slot > last_slot;  // -1 where it is one of the next token
    token = token + token_step - wraps;
    slot = next_slot - (wraps & top_k);
  }
  scatter_singly(entries, fours, to, token);
  cursor.token = token;
  cursor.slot = slot;
}

// Two loops a chunk: in a single one the loads of the next rows wait for the addresses of the stores before them,
// which come from such loads, wherever the processor does not dare to load ahead (or takes two addresses for one
// because their low 12 bits agree).
template <bool checked>
void place(const PlanArgs& a, const Entries& entries, std::size_t from, std::size_t to, u32* next) {
  Cursor cursor(from * kBlock, a.top_k);
  const std::size_t last = std::min<std::size_t>(a.n_entries, to * kBlock);
  for (std::size_t begin = from * kBlock; begin < last; begin += kChunk) {
    const std::size_t end = std::min(last, begin + kChunk);
    take_rows<checked>(entries, a.n_experts, begin, end, next);
    scatter<checked>(entries, static_cast<i32>(a.top_k), begin, end, cursor);
  }
}

}  // namespace

void place_blocks(const PlanArgs& a, const Entries& entries, std::size_t from, std::size_t to, u32* next) {
  place<true>(a, entries, from, to, next);
}

void place_kept(const PlanArgs& a, const Entries& entries, std::size_t from, std::size_t to, u32* next) {
  place<false>(a, entries, from, to, next);
}

void split_pairs(const u64* __restrict pairs, std::size_t from, std::size_t to, RowArrays rows) {
  const auto split_four = [=](std::size_t r) {
    const Int4 low = load<Int4>(pairs + r), high = load<Int4>(pairs + r + 2);
    store(rows.token + r, Int4(__builtin_shufflevector(low, high, 0, 2, 4, 6)));
    store(rows.weight + r, Int4(__builtin_shufflevector(low, high, 1, 3, 5, 7)));
  };
  std::size_t r = from;
  for (; r + 8 <= to; r += 8) {
    split_four(r);
    split_four(r + 4);
  }
  for (; r < to; ++r) {
    store(rows.token + r, static_cast<u32>(pairs[r]));
    store(rows.weight + r, static_cast<u32>(pairs[r] >> 32));
  }
}

}  // namespace expertile::plan_rows
