// kernels.h: the inner loops of the cpu device, one table an instruction set.
//
// The order of a GEMM's sum is the same in every table, and for one row as for many: 16 partial sums, the products
// with k mod 16 = i added to sum i in ascending k; then s[i] + s[i+8], s[i] + s[i+4], s[i] + s[i+2], s[0] + s[1].
// Products of two halves are exact in fp32, so that a fused multiply-add and a multiply and an add agree; fp32
// products are rounded before they are added, everywhere.
//
// The precision "bf16" rounds the weights, halves by then, once more; activations stay what they are, so that a layer's
// error is half of what it would be with both rounded. Products are exact still, and the order is the same.
//
// Tiles of bf16 ("avx512+amx" has them for the precision bf16, "amx" for both; with few rows an expert they are the
// slower way) have an order of their own, again one for one row as for many. A half is exactly the sum of two
// bf16, its upper 8 significant bits and the rest: activations are split so, and in the exact precision the weights.
// Each product of parts has its own sum: in ascending steps of 32 values of k one tdpbf16ps adds up a step's even
// products and its odd products, each in ascending order, then the two, then that to the sum. At the end high weight by
// high row, high by low, and in the exact precision low by high and low by low are added, in this order. An infinite
// operand's sum is NaN.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "expertile/tensor.h"

namespace expertile::cpu {

// Rows are padded with zeros to a multiple of this (no padded element is ever read from a buffer of the caller's).
inline constexpr std::size_t kLanes = 16;
inline constexpr std::size_t padded(std::size_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// One step of the register-blocked micro-kernel: `n_weights` rows of decoded weights by `n_rows` activation rows over
// `n_inner` (a multiple of 16) values of k. The 16 partial sums of each pair live in `partial` ([row][weight][16])
// between the steps of one sum; the last step adds them up into sums[row * sums_stride + weight].
struct MicroStep {
  const float* weights;
  std::size_t weight_stride;
  const float* rows;
  std::size_t row_stride;
  std::size_t n_inner;
  float* partial;
  float* sums;
  std::size_t sums_stride;
  int n_weights;
  int n_rows;
  bool first;
  bool last;
};

// Writes `n` weights, rounded to half, as fp32, and zeros up to a multiple of 16. `n` is a multiple of the quant block.
using DecodeRow = void (*)(const std::uint8_t* blocks, std::size_t n, float* out);

// sums[row * sums_stride + weight] for few rows, the weights going straight from the decoder into the sums.
// `weights` points to n_weights compressed rows; `rows` holds n_rows <= direct_rows padded fp32 rows.
struct DirectStep {
  const std::uint8_t* const* weights;
  int n_weights;
  const float* rows;
  std::size_t row_stride;
  int n_rows;
  std::size_t n_inner;
  float* sums;
  std::size_t sums_stride;
};
using DirectDot = void (*)(const DirectStep& step);

// Packs `n` weights: `high` takes them rounded to bf16, or with `low` split between the two; zeros up to a multiple
// of 32.
using PackRow = void (*)(const std::uint8_t* blocks, std::size_t n, std::uint32_t* high, std::uint32_t* low);

struct FormatKernels {
  DecodeRow decode;
  DirectDot direct;
  PackRow pack;  // nullptr where the table packs no operands
};

inline constexpr std::size_t kPack = 32;

// A panel on a machine with matrix tiles: n_weights <= tile_weights compressed rows by rows first_row .. first_row +
// count of the n_rows of a block that `convert_rows` filled; first_row is a multiple of 16.
struct TilePanel {
  FormatKernels format;
  std::size_t elements, bytes;  // of the format's quant block
  std::size_t n_inner;
  bool exact;
  const std::uint8_t* const* weights;
  int n_weights;
  const std::uint32_t* block;
  std::size_t n_rows, first_row, count;
  float* sums;
  std::size_t sums_stride;
  std::byte* scratch;
};

// The product by matrix tiles of bf16.
struct TileKernels {
  std::size_t max_rows;       // of a block: it must stay in the L2 cache
  std::size_t weights[2];     // rows of a panel: rounded, exact
  std::size_t scratch_bytes;  // of one worker
  std::size_t (*block_words)(std::size_t n_inner, std::size_t n_rows);
  // Up to 16 rows of halves, as tile number `tile` of a block.
  void (*convert_rows)(const std::uint16_t* const* rows, std::size_t n_rows, std::size_t n_inner, std::size_t tile,
                       std::uint32_t* block);
  void (*multiply)(const TilePanel& panel);
};

struct Kernels {
  const char* name;   // "avx512+amx", "amx", "avx512", "avx2", "neon", "portable"
  int micro_weights;  // the largest step of `multiply`
  int micro_rows;
  int direct_rows;  // up to so many rows `direct` is the faster way
  // Values of k that one step of `multiply` takes, and weight rows decoded at once: what a step needs of both must stay
  // in the L1 cache, or else its rows there and the panel in the L2 cache.
  std::size_t inner_step;
  std::size_t panel_weights;
  std::size_t block_bytes;                       // activation rows at once, as fp32: small panels want them in L2
  void (*multiply)(const MicroStep& step);       // halves
  void (*multiply_fp32)(const MicroStep& step);  // fp32: no fused multiply-add
  const TileKernels* tiles;                      // of the precision bf16; nullptr: no matrix tiles
  bool exact_by_tiles;                           // the exact precision as well
  void (*half_row)(const std::uint16_t* from, std::size_t n, float* to);  // and zeros up to a multiple of 16
  void (*bf16_row)(std::size_t n, float* row);  // to bf16 and back, to nearest even; n up to a multiple of 16
  void (*round_row)(const float* from, std::size_t n, std::uint16_t* to, std::uint64_t* saturated);
  void (*exp_row)(const float* x, std::size_t n, float* to);
  void (*sigmoid_row)(const float* x, std::size_t n, float* to);
  // half(silu(x / divisor)), half(silu(gate) * up); `saturated` counts.
  void (*silu_half_row)(const float* x, float divisor, std::size_t n, std::uint16_t* to, std::uint64_t* saturated);
  void (*swiglu_half_row)(const float* gate, const float* up, std::size_t n, std::uint16_t* to,
                          std::uint64_t* saturated);
  void (*scale_row)(const float* x, float scale, std::size_t n, float* to);       // to = scale * x
  void (*add_scaled_row)(const float* x, float scale, std::size_t n, float* to);  // to += scale * x
  void (*normalise_row)(const float* x, float inverse, const float* gamma, std::size_t n, float* to);
  void (*add_product_row)(const float* a, const float* b, std::size_t n, float* to);  // to += a * b
  float (*square_sum)(const float* x, std::size_t n);                                 // in the order of a GEMM's sum
  FormatKernels (*format)(Type type);
  // `n` rounds of independent multiply-adds in registers, to measure the machine's peak; returns the operations done.
  // `sink` holds 256 floats.
  double (*multiply_adds)(std::size_t n, float* sink);
};

// The best table that this machine runs, or the named one ("" = best); nullptr where the machine lacks it.
const Kernels* find_kernels(const std::string& name);
// The names of the tables that this machine runs, best first.
std::vector<std::string> kernel_names();

// One a source file; nullptr where the compiler's target has no such instructions.
const Kernels* avx512_amx_kernels();
const Kernels* amx_kernels();
const Kernels* avx512_kernels();
const Kernels* avx2_kernels();
const Kernels* neon_kernels();
const Kernels* portable_kernels();

// The grids of the IQ2 and IQ3 types as codes, one byte a weight, for the table look-ups of the SIMD decoders: the
// number of the magnitude (ascending), to which a sign adds 4 (IQ2: 3 magnitudes) or 8 (IQ3: 8).
struct GridCodes {
  alignas(64) std::uint8_t iq2_xxs[256][8];
  alignas(64) std::uint32_t iq2_xxs_lanes[256][8];
  alignas(64) std::uint8_t iq2_xs[512][8];
  alignas(64) std::uint16_t iq2_xs_words[512][8];  // the same codes, as registers with masks look them up
  alignas(64) std::uint32_t iq2_xs_lanes[512][8];
  alignas(64) std::uint16_t iq2_quads[16][4];  // by a scale's nibble: (0.5 + nibble) / 4 times a magnitude, as halves
  alignas(64) std::uint8_t iq2_s[1024][8];
  alignas(64) std::uint8_t iq3_xxs[256][4];
  alignas(64) std::uint8_t iq3_s[512][4];
  alignas(64) std::uint8_t sign4[256][8];  // by the 8 bits of a sign mask: 0 or 4 a weight
  alignas(64) std::uint8_t sign8[256][8];
  alignas(64) std::uint8_t parity4[128][8];  // the same by 7 bits, the eighth being their parity
  alignas(64) std::uint8_t parity8[128][8];
  alignas(64) std::uint32_t iq3_xxs_lanes[256][4];
  alignas(64) std::uint32_t iq3_s_lanes[512][4];
};
// Filled by find_kernels, before any SIMD decoder runs.
extern GridCodes grid_codes;
// Reads the grids off the portable decoders, once.
void fill_grid_codes();

}  // namespace expertile::cpu
