// layer.cpp: the groups of one layer's MoE half, kernel by kernel.
#include "core/layer.h"

#include "args.h"
#include "core/plan.h"
#include "expertile/error.h"

namespace expertile {
namespace {

// Columns that one threadgroup of an elementwise kernel handles, and of its _v4 form; values of all tokens' columns as
// one array that one of a flat _v4 form does.
constexpr std::uint32_t kChunk = 256, kVectorChunk = 640, kFlatChunk = 2048;

std::uint32_t ceil_div(std::uint64_t a, std::uint64_t b) { return static_cast<std::uint32_t>((a + b - 1) / b); }

// The tile of a dense GEMM; a result's bits do not depend on it.
Tile dense_tile(std::uint32_t n_tokens) {
  if (n_tokens <= 16) return {16, 64, 32, 2};
  if (n_tokens <= 64) return {32, 64, 32, 4};
  return {64, 64, 32, 4};
}

// Writes launches with few words: names to buffers, byte ranges for this chunk's T.
class Builder {
 public:
  Builder(const LayerContext& context, std::vector<Binding>* inputs) : c_(context), inputs_(inputs) {}

  std::uint64_t tokens() const { return c_.n_tokens; }
  Binding use(const char* name, Access access, std::uint64_t bytes) const {
    return {c_.buffers.at(name), access, 0, bytes, name};
  }
  Binding read(const char* name, std::uint64_t bytes) const { return use(name, Access::Read, bytes); }
  Binding write(const char* name, std::uint64_t bytes) const { return use(name, Access::Write, bytes); }
  Binding saturated() const { return use("saturated", Access::ReadWrite, 8); }
  Binding weight(const BufferRef& buffer, const std::string& name) const {
    Binding b{buffer, Access::Read, 0, buffer->bytes(), name};
    inputs_->push_back(b);
    return b;
  }

  Launch dense(const char* step, const DenseWeight& w, const char* x, const char* y, bool fp32) const {
    const Tile tile = dense_tile(c_.n_tokens);
    const args::GemmArgs args{c_.n_tokens, w.n_cols, w.n_inner, w.scale, w.row_bytes};
    Launch launch;
    launch.step = step;
    // The read of the hyper-connection and the router stay exact: their sums choose the experts.
    if (!fp32 && launch.step == "shared") launch.precision = c_.options.precision;
    launch.kernel = std::string("gemm_dense_") + (fp32 ? "fp32" : type_info(w.type).suffix) + "_" + tile.suffix();
    launch.args = pack_args(args);
    launch.buffers = {read(x, tokens() * w.n_inner * (fp32 ? 4 : 2)), weight(w.buffer, w.name),
                      write(y, tokens() * w.n_cols * 4)};
    launch.grid.size = {ceil_div(w.n_cols, tile.n), ceil_div(c_.n_tokens, tile.m), 1};
    return launch;
  }
  // F32 router, inject and shared gate are used in fp32 on fp32 activations, all else in fp16.
  Launch dense_from_mixed(const char* step, const DenseWeight& w, const char* y, bool keep_fp32) const {
    const bool fp32 = keep_fp32 && w.type == Type::F32;
    return dense(step, w, fp32 ? "mixed" : "mixed_half", y, fp32);
  }

  std::string grouped_name(const char* base, const ExpertWeight& w, const Tile& tile) const {
    return base + std::string(type_info(w.type).suffix) + "_" + tile.suffix();
  }
  // `direct`: the kernel reads mixed_half through row_token instead of the gathered rows.
  Launch grouped(const ExpertWeight& w, const Tile& tile, std::uint32_t meta_word, bool direct, const char* x,
                 const char* y) const {
    const args::GemmArgs args{0, w.n_cols, w.n_inner, 1.0f, w.row_bytes};
    const std::uint64_t rows = max_rows();
    Launch launch;
    launch.step = "experts";
    launch.precision = c_.options.precision;
    launch.kernel = grouped_name("gemm_grouped_", w, tile) + (direct ? "_gatherless" : "");
    launch.args = pack_args(args);
    if (direct) {
      launch.buffers = {read("mixed_half", tokens() * w.n_inner * 2), read("row_token", rows * 4)};
    } else {
      launch.buffers = {read(x, rows * w.n_inner * 2)};
    }
    for (const Binding& b :
         {weight(w.table, w.name + " table"), weight(w.scales, w.name + " scale"), read("tiles", rows / tile.m * 16),
          read("meta", EXPERTILE_META_WORDS * 4), write(y, rows * w.n_cols * 4)}) {
      launch.buffers.push_back(b);
    }
    launch.grid = indirect(meta_word, {ceil_div(w.n_cols, tile.n), static_cast<std::uint32_t>(rows / tile.m), 1});
    return launch;
  }
  Launch grouped_swiglu() const {
    const ExpertWeight &g = c_.weights.gate, &u = c_.weights.up;
    const Tile& tile = c_.options.gate_up;
    const std::uint64_t rows = max_rows();
    Launch launch = grouped(g, tile, EXPERTILE_META_GRID_GATE_UP, false, "rows", "gate");
    launch.kernel = grouped_name("gemm_grouped_swiglu_", g, tile);
    launch.buffers = {read("rows", rows * g.n_inner * 2),
                      weight(g.table, g.name + " table"),
                      weight(u.table, u.name + " table"),
                      weight(g.scales, g.name + " scale"),
                      weight(u.scales, u.name + " scale"),
                      read("tiles", rows / tile.m * 16),
                      read("meta", EXPERTILE_META_WORDS * 4),
                      write("hidden", rows * g.n_cols * 2),
                      saturated()};
    return launch;
  }
  // The fused kernels exist for quantized experts, SwiGLU's for gate and up of one type.
  bool fused_swiglu() const {
    const ExpertWeight &g = c_.weights.gate, &u = c_.weights.up;
    return c_.fusion.swiglu && g.type == u.type &&
           find_kernel(grouped_name("gemm_grouped_swiglu_", g, c_.options.gate_up));
  }
  bool gatherless() const {
    const auto exists = [&](const ExpertWeight& w) {
      return find_kernel(grouped_name("gemm_grouped_", w, c_.options.gate_up) + "_gatherless") != nullptr;
    };
    return c_.fusion.gatherless && exists(c_.weights.gate) && exists(c_.weights.up);
  }

  Launch simple(const char* step, const char* kernel, std::vector<std::byte> args, std::vector<Binding> buffers,
                std::uint32_t x, std::uint32_t y) const {
    Launch launch;
    launch.step = step;
    launch.kernel = kernel;
    launch.args = std::move(args);
    launch.buffers = std::move(buffers);
    launch.grid.size = {x, y, 1};
    return launch;
  }
  // A kernel that has a _v4 form, over columns and tokens.
  Launch by_column(const char* step, const char* kernel, std::vector<std::byte> args, std::vector<Binding> buffers,
                   std::uint32_t columns) const {
    return simple(step, form(kernel).c_str(), std::move(args), std::move(buffers),
                  ceil_div(columns, c_.vector ? kVectorChunk : kChunk), c_.n_tokens);
  }
  // The same where the _v4 form is flat.
  Launch by_value(const char* step, const char* kernel, std::vector<std::byte> args, std::vector<Binding> buffers,
                  std::uint32_t columns) const {
    if (!c_.vector) return by_column(step, kernel, std::move(args), std::move(buffers), columns);
    return simple(step, form(kernel).c_str(), std::move(args), std::move(buffers),
                  ceil_div(tokens() * columns, kFlatChunk), 1);
  }
  std::string form(const char* kernel) const { return std::string(kernel) + (c_.vector ? "_v4" : ""); }
  Launch by_row(const char* step, const char* kernel, std::vector<std::byte> args, std::vector<Binding> buffers) const {
    Launch launch = simple(step, kernel, std::move(args), std::move(buffers), 1, 1);
    launch.grid = indirect(EXPERTILE_META_GRID_ROWS, {static_cast<std::uint32_t>(max_rows()), 1, 1});
    return launch;
  }

  std::uint64_t max_rows() const {
    return expertile::max_rows(c_.n_tokens, c_.config.top_k, c_.config.n_experts, c_.options.gate_up.m);
  }
  Grid indirect(std::uint32_t meta_word, std::array<std::uint32_t, 3> bound) const {
    Grid grid;
    grid.indirect = c_.buffers.at("meta");
    grid.indirect_offset = meta_word * 4;
    grid.max_grid = bound;
    return grid;
  }

  std::vector<Group> hc_read() const;
  std::vector<Group> middle() const;  // route, shared expert and plan, interleaved
  std::vector<Group> experts() const;

 private:
  Launch norm() const;
  Launch inject() const;
  Launch hc_up() const;
  Launch topk() const;
  Launch swiglu() const;
  std::vector<Group> plan() const;
  std::vector<Group> hidden() const;

  const LayerContext& c_;
  std::vector<Binding>* inputs_;
};

Launch Builder::norm() const {
  const Config& s = c_.config;
  const std::uint64_t flat = tokens() * s.n_streams * s.dim;
  return simple("hc_read", "gr_norm_h", pack_args(args::NormArgs{c_.n_tokens, s.n_streams, s.dim, s.rms_eps}),
                {read("streams", flat * 4), weight(c_.weights.norm.buffer, c_.weights.norm.name),
                 write("normed_half", flat * 2), write("inverse_rms", tokens() * s.n_streams * 4), saturated()},
                s.n_streams, c_.n_tokens);
}

Launch Builder::inject() const {
  const Config& s = c_.config;
  const DenseWeight& w = c_.weights.inject;
  if (w.type != Type::F32) return dense("hc_read", w, "normed_half", "inject", false);
  return simple("hc_read", "gr_inject", pack_args(args::NormArgs{c_.n_tokens, s.n_streams, s.dim, s.rms_eps}),
                {read("streams", tokens() * s.n_streams * s.dim * 4), read("inverse_rms", tokens() * s.n_streams * 4),
                 weight(c_.weights.norm.buffer, c_.weights.norm.name), weight(w.buffer, w.name),
                 write("inject", tokens() * s.n_streams * 4)},
                c_.n_tokens, 1);
}

Launch Builder::hc_up() const {
  const Config& s = c_.config;
  const DenseWeight& w = c_.weights.hc_up;
  const Tile tile = dense_tile(c_.n_tokens);
  const std::string kernel = std::string("gemm_hc_up_") + type_info(w.type).suffix + "_" + tile.suffix();
  return simple("hc_read", kernel.c_str(),
                pack_args(args::HcUpArgs{c_.n_tokens, s.n_streams, s.dim, s.low_rank, w.row_bytes}),
                {read("low_rank_half", tokens() * s.low_rank * 2), weight(w.buffer, w.name),
                 read("streams", tokens() * s.n_streams * s.dim * 4), read("inverse_rms", tokens() * s.n_streams * 4),
                 weight(c_.weights.norm.buffer, c_.weights.norm.name), write("mixed", tokens() * s.dim * 4),
                 write("mixed_half", tokens() * s.dim * 2), saturated()},
                ceil_div(s.dim, tile.n), ceil_div(c_.n_tokens, tile.m));
}

std::vector<Group> Builder::hc_read() const {
  const std::uint32_t rank = c_.config.low_rank;
  const args::ElementArgs down{c_.n_tokens, rank, static_cast<float>(c_.config.n_streams), 0};
  return {{"norm", {norm()}},
          {"low rank down", {dense("hc_read", c_.weights.hc_down, "normed_half", "low_rank", false), inject()}},
          {"low rank silu",
           {by_value("hc_read", "gr_epi_down", pack_args(down),
                     {read("low_rank", tokens() * rank * 4), write("low_rank_half", tokens() * rank * 2), saturated()},
                     rank)}},
          {"low rank up", {hc_up()}}};
}

Launch Builder::topk() const {
  const Config& s = c_.config;
  return simple("route", "route_topk", pack_args(args::RouteArgs{c_.n_tokens, s.n_experts, s.top_k, c_.layer}),
                {read("logits", tokens() * s.n_experts * 4), write("ids", tokens() * s.top_k * 4),
                 write("weights", tokens() * s.top_k * 4), use("status", Access::ReadWrite, tokens() * 4)},
                c_.n_tokens, 1);
}

Launch Builder::swiglu() const {
  const std::uint32_t ffn = c_.config.shared_ffn;
  const std::uint64_t n = tokens() * ffn;
  return by_value("shared", "swiglu_h", pack_args(args::ElementArgs{c_.n_tokens, ffn, 1.0f, 0}),
                  {read("shared_gate", n * 4), read("shared_up", n * 4), write("shared_hidden", n * 2), saturated()},
                  ffn);
}

std::vector<Group> Builder::plan() const {
  const Config& s = c_.config;
  const args::PlanArgs args = plan_args(c_.n_tokens, s.top_k, s.n_experts, c_.options.gate_up.m,
                                        ceil_div(c_.weights.gate.n_cols, c_.options.gate_up.n),
                                        ceil_div(c_.weights.down.n_cols, c_.options.down.n));
  const auto at = [&](const char* name) { return c_.buffers.at(name); };
  return plan_groups(c_.plan, args,
                     {at("ids"), at("weights"), at("block_count"), at("block_offset"), at("expert_offset"), at("tiles"),
                      at("row_token"), at("row_weight"), at("position"), at("meta")});
}

std::vector<Group> Builder::middle() const {
  const LayerWeights& w = c_.weights;
  std::vector<Group> groups = {{"router and shared expert",
                                {dense_from_mixed("route", w.router, "logits", true),
                                 dense_from_mixed("shared", w.shared_gate, "shared_gate", false),
                                 dense_from_mixed("shared", w.shared_up, "shared_up", false),
                                 dense_from_mixed("shared", w.shared_scalar, "shared_scalar", true)}},
                               {"top k", {topk(), swiglu()}}};
  std::vector<Group> planned = plan();
  planned.front().launches.push_back(dense("shared", w.shared_down, "shared_hidden", "shared_out", false));
  groups.insert(groups.end(), planned.begin(), planned.end());
  return groups;
}

// From the plan to `hidden`: gathered rows, then gate and up, then SwiGLU, or two of the three in one.
std::vector<Group> Builder::hidden() const {
  const LayerWeights& w = c_.weights;
  const std::uint64_t rows = max_rows(), meta = EXPERTILE_META_WORDS * 4;
  const std::uint32_t dim = c_.config.dim, ffn = w.gate.n_cols;
  const Tile& tile = c_.options.gate_up;
  const Group gather = {"gather",
                        {by_row("gather", "mm_gather_h", pack_args(args::GatherArgs{dim}),
                                {read("meta", meta), read("row_token", rows * 4),
                                 read("mixed_half", tokens() * dim * 2), write("rows", rows * dim * 2)})}};
  if (fused_swiglu()) return {gather, {"gate, up and activation", {grouped_swiglu()}}};
  const Group activation = {"activation",
                            {by_row("experts", form("act_f16").c_str(), pack_args(args::ElementArgs{0, ffn, 1.0f, 0}),
                                    {read("meta", meta), read("row_token", rows * 4), read("gate", rows * ffn * 4),
                                     read("up", rows * ffn * 4), write("hidden", rows * ffn * 2), saturated()})}};
  const bool direct = gatherless();
  const Group products = {"gate and up",
                          {grouped(w.gate, tile, EXPERTILE_META_GRID_GATE_UP, direct, "rows", "gate"),
                           grouped(w.up, tile, EXPERTILE_META_GRID_GATE_UP, direct, "rows", "up")}};
  if (direct) return {products, activation};
  return {gather, products, activation};
}

std::vector<Group> Builder::experts() const {
  const Config& s = c_.config;
  const std::uint64_t rows = max_rows(), streams = tokens() * s.n_streams * s.dim * 4;
  std::vector<Group> groups = hidden();
  groups.push_back(
      {"down", {grouped(c_.weights.down, c_.options.down, EXPERTILE_META_GRID_DOWN, false, "hidden", "expert_out")}});
  const std::vector<Binding> sum = {read("position", tokens() * s.top_k * 4), read("row_weight", rows * 4),
                                    read("expert_out", rows * s.dim * 4)};
  const std::vector<Binding> out = {read("shared_out", tokens() * s.dim * 4), read("shared_scalar", tokens() * 4),
                                    read("inject", tokens() * s.n_streams * 4),
                                    use("streams", Access::ReadWrite, streams)};
  const auto add = [&](const char* group, const char* step, const char* kernel, std::vector<std::byte> args,
                       std::vector<Binding> first, const std::vector<Binding>& last) {
    first.insert(first.end(), last.begin(), last.end());
    groups.push_back({group, {by_column(step, kernel, std::move(args), std::move(first), s.dim)}});
  };
  if (c_.fusion.combine) {
    add("combine and write", "hc_write", "moe_out_combine",
        pack_args(args::CombineOutArgs{c_.n_tokens, s.top_k, s.n_streams, s.dim}), sum, out);
  } else {
    const Binding routed = write("routed", tokens() * s.dim * 4);
    add("combine", "combine", "mm_combine", pack_args(args::CombineArgs{c_.n_tokens, s.top_k, s.dim}), sum, {routed});
    add("write", "hc_write", "moe_out", pack_args(args::OutArgs{c_.n_tokens, s.n_streams, s.dim}),
        {read("routed", routed.bytes)}, out);
  }
  return groups;
}

}  // namespace

LayerForms default_forms(const std::string& device_kind) {
  struct Row {
    const char* kind;
    LayerForms forms;
  };
  // cuda: the _v4 kernels move 1.4 times the bytes a second, and mm_combine with moe_out in one kernel spares `routed`
  // (results/h200/epilogue.json). cpu: a native kernel serves both forms; the combine in one kernel takes 1 / 1.6 of
  // the time (results/xeon/epilogue.json), the other fusions gain nothing beyond the spread.
  static constexpr Row kTable[] = {
      {"cpu", {{false, false, true}, false}},
      {"cuda", {{false, false, true}, true}},
  };
  for (const Row& row : kTable) {
    if (device_kind == row.kind) return row.forms;
  }
  return {};
}

std::vector<Group> layer_groups(const LayerContext& context, std::vector<Binding>* inputs) {
  const Builder builder(context, inputs);
  const Config& s = context.config;
  const std::uint64_t tokens = context.n_tokens;
  for (const Binding& b : {builder.use("streams", Access::Read, tokens * s.n_streams * s.dim * 4),
                           builder.use("status", Access::Read, tokens * 4), builder.saturated()}) {
    inputs->push_back(b);
  }
  std::vector<Group> groups = builder.hc_read();
  for (auto part : {builder.middle(), builder.experts()}) groups.insert(groups.end(), part.begin(), part.end());
  return groups;
}

NamedBuffers make_buffers(const Config& s, const WindowOptions& options, Device& device) {
  const std::uint64_t t = options.max_tokens, e = s.n_experts, k = s.top_k, d = s.dim, c = s.n_streams;
  const std::uint64_t rows = max_rows(options.max_tokens, s.top_k, s.n_experts, options.gate_up.m);
  const std::uint64_t blocks = ceil_div(t * k, EXPERTILE_BLOCK_ENTRIES), ffn = s.max_expert_ffn();
  const std::map<std::string, std::uint64_t> sizes = {
      {"streams", t * c * d * 4},
      {"normed_half", t * c * d * 2},
      {"inverse_rms", t * c * 4},
      {"inject", t * c * 4},
      {"low_rank", t * s.low_rank * 4},
      {"low_rank_half", t * s.low_rank * 2},
      {"mixed", t * d * 4},
      {"mixed_half", t * d * 2},
      {"logits", t * e * 4},
      {"ids", t * k * 4},
      {"weights", t * k * 4},
      {"status", t * 4},
      {"saturated", 8},
      {"shared_gate", t * s.shared_ffn * 4},
      {"shared_up", t * s.shared_ffn * 4},
      {"shared_hidden", t * s.shared_ffn * 2},
      {"shared_scalar", t * 4},
      {"shared_out", t * d * 4},
      {"block_count", blocks * e * 4},
      {"block_offset", blocks * e * 4},
      {"expert_offset", (e + 1) * 4},
      {"tiles", rows / options.gate_up.m * 16},
      {"row_token", rows * 4},
      {"row_weight", rows * 4},
      {"position", t * k * 4},
      {"meta", EXPERTILE_META_WORDS * 4},
      {"rows", rows * d * 2},
      {"gate", rows * ffn * 4},
      {"up", rows * ffn * 4},
      {"hidden", rows * ffn * 2},
      {"expert_out", rows * d * 4},
      {"routed", t * d * 4},
  };
  NamedBuffers buffers;
  for (const auto& [name, bytes] : sizes) buffers[name] = device.alloc(bytes);
  return buffers;
}

}  // namespace expertile
