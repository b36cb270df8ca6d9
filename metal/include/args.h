// args.h: every kernel's argument struct, shared word for word by the kernels and the host.
//
// Counts are 32 bits, strides and anything that multiplies two counts 64 bits. No bool, pointer or size_t inside, so
// that every compiler lays the structs out alike; the sizes are asserted below by each of them.
#pragma once

#ifdef __METAL_VERSION__
#define EXPERTILE_ARGS_NAMESPACE_BEGIN
#define EXPERTILE_ARGS_NAMESPACE_END
#else
#include <cstdint>
#define EXPERTILE_ARGS_NAMESPACE_BEGIN namespace expertile::args {
#define EXPERTILE_ARGS_NAMESPACE_END }
#endif

EXPERTILE_ARGS_NAMESPACE_BEGIN

#ifdef __METAL_VERSION__
typedef uint u32;
typedef ulong u64;
#else
typedef std::uint32_t u32;
typedef std::uint64_t u64;
#endif

// Entries that one threadgroup of a plan kernel handles.
#define EXPERTILE_BLOCK_ENTRIES 1024

// Threadgroups that the place kernels of the two_dispatch plan have at least.
#define EXPERTILE_PLACE_GROUPS 16

// Indices into the plan's `meta` array of EXPERTILE_META_WORDS words.
#define EXPERTILE_META_ROWS 0
#define EXPERTILE_META_TILES 1
#define EXPERTILE_META_KEPT 2
#define EXPERTILE_META_ACTIVE 3
#define EXPERTILE_META_LARGEST 4
#define EXPERTILE_META_GRID_ROWS 5
#define EXPERTILE_META_GRID_GATE_UP 8
#define EXPERTILE_META_GRID_DOWN 11
#define EXPERTILE_META_WORDS 14

// The plan kernels (mm_clear, mm_hist, mm_scan, mm_place and their variants).
struct PlanArgs {
  u32 n_tokens;         // T
  u32 n_experts;        // E
  u32 top_k;            // K
  u32 tile_rows;        // M: each expert's rows are padded to a multiple of it
  u32 n_entries;        // T * K
  u32 n_blocks;         // ceil(n_entries / 1024)
  u32 max_rows;         // bound on n_rows; the row arrays hold this many
  u32 gate_up_columns;  // column tiles of the gate/up GEMM: meta grid (gate_up_columns, n_tiles, 1)
  u32 down_columns;     // column tiles of the down GEMM: meta grid (down_columns, n_tiles, 1)
};

// mm_gather, mm_gather_h: one threadgroup a row.
struct GatherArgs {
  u32 dim;  // D
};

// Dense and grouped GEMM: y[r, n] = scale * sum_k w[n, k] * x[r, k].
struct GemmArgs {
  u32 n_rows;            // dense: rows of x; grouped: unused (the plan's tiles say)
  u32 n_cols;            // outputs: rows of the weight matrix
  u32 n_inner;           // inner size, a multiple of the format's quant block
  float scale;           // the tensor's `.scale` (1 where it has none); grouped: unused (a scale an expert)
  u64 weight_row_bytes;  // bytes from one output's weights to the next one's
};

// gemm_swiglu_f16: both products of a gated FFN, whose weights have one format, and h = half(silu(gate) * up).
struct GemmSwigluArgs {
  u32 n_rows;
  u32 n_cols;
  u32 n_inner;
  float gate_scale;
  float up_scale;
  u32 zero;              // keeps the next word aligned alike everywhere
  u64 weight_row_bytes;  // of both matrices
};

// gr_norm_h, gr_inject: x [T, C, D].
struct NormArgs {
  u32 n_tokens;
  u32 n_streams;  // C
  u32 dim;        // D
  float eps;
};

// gemm_hc_up: gate = W_up @ lo with its epilogue over the C streams.
struct HcUpArgs {
  u32 n_tokens;
  u32 n_streams;
  u32 dim;
  u32 n_inner;  // R
  u64 weight_row_bytes;
};

// gr_epi_down, swiglu_h, act_f16: elementwise over [n_rows, n_cols].
struct ElementArgs {
  u32 n_rows;
  u32 n_cols;
  float divisor;  // gr_epi_down: C; else unused
  u32 zero;       // keeps the size a multiple of 8
};

// route_topk: logits [T, E].
struct RouteArgs {
  u32 n_tokens;
  u32 n_experts;
  u32 top_k;
  u32 layer;  // written, plus 1, into the status of a token that cannot be routed
};

// mm_combine: routed[t] = sum over slots, in slot order, of weight * y[position].
struct CombineArgs {
  u32 n_tokens;
  u32 top_k;
  u32 dim;
};

// moe_out: x[t, c] += 2 * sigmoid(inject[t, c] / C) * (routed[t] + sigmoid(sgv[t]) * ys[t]).
struct OutArgs {
  u32 n_tokens;
  u32 n_streams;
  u32 dim;
};

// moe_out_combine: mm_combine and moe_out in one.
struct CombineOutArgs {
  u32 n_tokens;
  u32 top_k;
  u32 n_streams;
  u32 dim;
};

// dequantize_<format>: the decoder by itself, for tests: n_values fp32 numbers.
struct DequantizeArgs {
  u64 n_values;
};

static_assert(sizeof(PlanArgs) == 36, "PlanArgs");
static_assert(sizeof(GatherArgs) == 4, "GatherArgs");
static_assert(sizeof(GemmArgs) == 24, "GemmArgs");
static_assert(sizeof(GemmSwigluArgs) == 32, "GemmSwigluArgs");
static_assert(sizeof(NormArgs) == 16, "NormArgs");
static_assert(sizeof(HcUpArgs) == 24, "HcUpArgs");
static_assert(sizeof(ElementArgs) == 16, "ElementArgs");
static_assert(sizeof(RouteArgs) == 16, "RouteArgs");
static_assert(sizeof(CombineArgs) == 12, "CombineArgs");
static_assert(sizeof(OutArgs) == 12, "OutArgs");
static_assert(sizeof(CombineOutArgs) == 16, "CombineOutArgs");
static_assert(sizeof(DequantizeArgs) == 8, "DequantizeArgs");

EXPERTILE_ARGS_NAMESPACE_END
