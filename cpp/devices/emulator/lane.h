// lane.h: what a lowered kernel asks of the emulator while it runs as one lane of a threadgroup.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace expertile::emulator {

constexpr std::size_t kSlotBytes = 32;
constexpr std::uint32_t kLanes = 32;

// A place in a .metal file. `file` is a string literal.
struct Site {
  const char* file = "";
  int line = 0;
};
inline std::string place(Site site) { return std::string(site.file) + ":" + std::to_string(site.line); }

// One operation of a simdgroup: each lane's operand and result.
struct SimdOperation {
  alignas(16) unsigned char in[kLanes][kSlotBytes];
  alignas(16) unsigned char out[kLanes][kSlotBytes];
  std::uint32_t parameter[kLanes];
  std::uint32_t live;  // bits of the lanes that take part: those that have not returned
};
using SimdFunction = void (*)(SimdOperation&);

// Where a lane of the grid is. Threadgroups are one-dimensional.
struct Position {
  std::uint32_t thread = 0;
  std::uint32_t threads = 0;
  std::uint32_t group[3] = {0, 0, 0};
  std::uint32_t grid[3] = {1, 1, 1};
};

std::uint32_t lane_in_simdgroup();
std::uint32_t thread_in_threadgroup();
// The operation that this lane fills in next; simd_meet waits for the others, and the last one calls `compute`.
SimdOperation& simd_operation();
void simd_meet(SimdFunction compute, const char* name, Site site);
void threadgroup_barrier(Site site);
// One simdgroup_matrix or matmul2d call. The first lane to make it fills this in, the others take what they need from
// it; when they meet next, all must have made as many calls, at the same places and memory.
struct MatrixCall {
  alignas(16) float whole[64];  // simdgroup_matrix: row by row
  bool shared;                  // is `whole` the result? If not, the lanes exchange their elements
  Site site;
  const void* memory;
  std::vector<float> left, right;  // matmul2d: the operands, as multiply_rows takes their rows
};
// This lane's next call; `memory` is what it loads or stores (nullptr = neither).
MatrixCall& matrix_call(const void* memory, Site site, bool& first);
// The same for matmul2d in the scope of `simdgroups` simdgroups: 1, or all that were dispatched.
MatrixCall& tensor_call(std::uint32_t simdgroups, const void* memory, Site site, bool& first);
[[noreturn]] void fail_returned_lane(std::uint32_t lane);
[[noreturn]] void fail_call(const std::string& expected, const std::string& got, Site site);

// The threadgroup's memory of the array declared at `key`: the same for all its lanes, garbage at first.
void* threadgroup_memory(const void* key, std::size_t bytes, const char* name, Site site);

// 8x8 halves or floats (`element_bytes` 2 or 4) to floats, row by row.
void load_matrix(float* to, const void* from, std::size_t element_bytes, std::uint64_t elements_per_row,
                 bool transpose);
// d = a b + c: acc = RNE(acc + a[k] b[k]), k ascending; `exact`: products are exact in fp32 (they come from halves).
void multiply_accumulate(float* d, const float* a, const float* b, const float* c, bool exact);

// How `elements` of a cooperative tensor lie in `capacity` slots of each of `threads` threads, which are more: runs of
// `run` neighbouring elements in places drawn at random. [threads][capacity], `elements` where there is none.
std::vector<std::uint32_t> tensor_layout(std::uint32_t elements, std::uint32_t threads, std::uint32_t capacity,
                                         std::uint32_t run);
// Do they lie in runs of four, as was seen on hardware (order ascending), or each by itself?
bool elements_in_fours();
// sum + a . b over chunks of 16, ascending, as measured on Apple hardware. Of each chunk the rows hold the eight values
// of even k, then those of odd k, all of them halves.
float multiply_rows(const float* a, const float* b, std::uint32_t chunks, float sum);

}  // namespace expertile::emulator
