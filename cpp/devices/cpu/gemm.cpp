// Dense and grouped GEMM. The tile of a kernel's name makes no difference here: a sum does not depend on it.
#include "devices/cpu/gemm.h"
#include "devices/cpu/rows.h"

namespace expertile::cpu {

TaskScratch TaskScratch::take(ThreadPool& pool, int worker, const PanelGemm& gemm, std::size_t n_rows,
                              std::size_t n_sums) {
  const std::size_t block = padded(gemm.block_floats(n_rows));
  const std::size_t sums = padded(n_sums);
  std::byte* memory = pool.scratch(worker, (block + sums) * sizeof(float) + gemm.scratch_bytes());
  auto* floats = reinterpret_cast<float*>(memory);
  return {floats, floats + block, memory + (block + sums) * sizeof(float)};
}

std::vector<ExpertTask> expert_tasks(const std::uint32_t* tiles, std::uint32_t n_tiles, std::size_t n_columns,
                                     std::size_t panel, std::size_t max_rows, int threads) {
  std::vector<ExpertTask> merged;
  std::size_t all_rows = 0;
  for (std::uint32_t i = 0; i < n_tiles; ++i) {
    const std::uint32_t expert = tiles[4 * i], row = tiles[4 * i + 1], rows = tiles[4 * i + 2];
    if (rows == 0) continue;
    all_rows += rows;
    if (!merged.empty()) {
      ExpertTask& last = merged.back();
      if (last.expert == expert && last.row + last.n_rows == row && last.n_rows + rows <= max_rows) {
        last.n_rows += rows;
        continue;
      }
    }
    merged.push_back({expert, row, rows, 0, n_columns});
  }
  // A row costs its products, an expert its decoding: about that of a dozen rows.
  constexpr std::size_t kDecode = 12;
  const std::size_t pieces = 8 * static_cast<std::size_t>(threads);
  const std::size_t target = (all_rows + kDecode * merged.size()) * n_columns / pieces + 1;
  std::vector<ExpertTask> tasks;
  for (const ExpertTask& whole : merged) {
    const std::size_t cost = (whole.n_rows + kDecode) * n_columns;
    const std::size_t panels = (n_columns + panel - 1) / panel;
    const std::size_t cuts = std::min(panels, (cost + target - 1) / target);
    for (std::size_t cut = 0; cut < cuts; ++cut) {
      const std::size_t begin = panels * cut / cuts * panel;
      const std::size_t end = std::min(n_columns, panels * (cut + 1) / cuts * panel);
      tasks.push_back({whole.expert, whole.row, whole.n_rows, begin, end - begin});
    }
  }
  return tasks;
}

namespace {

void dense(const NativeCall& call, Type type, Operand operand) {
  const auto& args = call.arguments<args::GemmArgs>();
  const std::size_t value_bytes = operand == Operand::Half ? 2 : 4;
  const auto* x = call.buffer<const std::byte>(1);
  const Matrix matrix{call.buffer<const std::uint8_t>(2), args.weight_row_bytes};
  auto* y = call.buffer<float>(3);
  const PanelGemm gemm(call.kernels, type, operand, call.precision, args.n_inner);
  dense_product(
      call.pool, gemm, args.n_rows, args.n_cols, 1,
      [&](std::size_t row) { return x + row * args.n_inner * value_bytes; },
      [&](std::size_t, std::size_t column) { return matrix.row(column); },
      [&](std::size_t row, std::size_t count, std::size_t column, std::size_t columns, const float* sums) {
        for (std::size_t r = 0; r < count; ++r, sums += columns) {
          call.kernels.scale_row(sums, args.scale, columns, y + (row + r) * args.n_cols + column);
        }
      });
}

// One task of a grouped product: its real rows by its columns. source(row of the plan) gives a row of activations;
// the rest is as for_panels has it.
template <class Source, class Weights, class Emit>
void grouped_task(ThreadPool& pool, int worker, const PanelGemm& gemm, const ExpertTask& task, std::size_t per_column,
                  const Source& source, const Weights& weights, const Emit& emit) {
  const TaskScratch scratch =
      TaskScratch::take(pool, worker, gemm, task.n_rows, task.n_rows * gemm.panel_weights(task.n_rows));
  gemm.convert_rows([&](std::size_t row) { return source(task.row + row); }, 0, task.n_rows, task.n_rows,
                    scratch.block);
  const PanelGemm::Panel panel{nullptr, 0, scratch.block, task.n_rows, 0, task.n_rows, scratch.sums, 0};
  for_panels(gemm, panel, task.column, task.column + task.n_columns, per_column, scratch.rest, weights, emit);
}

// What the plan says of a grouped launch, and the tables of pointers and scales by expert.
struct Grouped {
  const std::uint64_t* table;
  const float* expert_scale;
  const std::uint32_t* tiles;
  const std::uint32_t* meta;
};

template <class Source>
void grouped(const NativeCall& call, Type type, const Grouped& plan, float* y, const Source& source) {
  const auto& args = call.arguments<args::GemmArgs>();
  const PanelGemm gemm(call.kernels, type, Operand::Half, call.precision, args.n_inner);
  const std::vector<ExpertTask> tasks = expert_tasks(plan.tiles, plan.meta[EXPERTILE_META_TILES], args.n_cols,
                                                     gemm.panel_weights(), gemm.max_rows(), call.pool.threads());
  call.pool.run(tasks.size(), [&](std::size_t index, int worker) {
    const ExpertTask& task = tasks[index];
    const Matrix matrix{reinterpret_cast<const std::uint8_t*>(plan.table[task.expert]), args.weight_row_bytes};
    const float scale = plan.expert_scale[task.expert];
    grouped_task(
        call.pool, worker, gemm, task, 1, source, [&](std::size_t, std::size_t column) { return matrix.row(column); },
        [&](std::size_t column, std::size_t columns, const float* sums) {
          for (std::size_t row = 0; row < task.n_rows; ++row, sums += columns) {
            call.kernels.scale_row(sums, scale, columns, y + (task.row + row) * args.n_cols + column);
          }
        });
  });
}

// half(silu(gate) * up) of `count` rows, gate and up side by side in `sums` and scaled there.
std::uint64_t write_swiglu(const Kernels& kernels, float* sums, std::size_t count, std::size_t columns,
                           float gate_scale, float up_scale, std::uint16_t* to, std::size_t stride) {
  std::uint64_t saturated = 0;
  for (std::size_t row = 0; row < count; ++row, sums += 2 * columns, to += stride) {
    float* up = sums + columns;
    kernels.scale_row(sums, gate_scale, columns, sums);
    kernels.scale_row(up, up_scale, columns, up);
    kernels.swiglu_half_row(sums, up, columns, to, &saturated);
  }
  return saturated;
}

}  // namespace

void gemm_dense(const NativeCall& call, Type type) { dense(call, type, Operand::Half); }
void gemm_dense_fp32(const NativeCall& call) { dense(call, Type::F32, Operand::Float); }

void gemm_grouped(const NativeCall& call, Type type) {
  const std::size_t n_inner = call.arguments<args::GemmArgs>().n_inner;
  const auto* x = call.buffer<const std::uint16_t>(1);
  const Grouped plan{call.buffer<const std::uint64_t>(2), call.buffer<const float>(3),
                     call.buffer<const std::uint32_t>(4), call.buffer<const std::uint32_t>(5)};
  grouped(call, type, plan, call.buffer<float>(6), [&](std::size_t row) { return x + row * n_inner; });
}

void gemm_grouped_gatherless(const NativeCall& call, Type type) {
  const std::size_t n_inner = call.arguments<args::GemmArgs>().n_inner;
  const auto* x = call.buffer<const std::uint16_t>(1);
  const auto* row_token = call.buffer<const std::int32_t>(2);
  const Grouped plan{call.buffer<const std::uint64_t>(3), call.buffer<const float>(4),
                     call.buffer<const std::uint32_t>(5), call.buffer<const std::uint32_t>(6)};
  grouped(call, type, plan, call.buffer<float>(7),
          [&](std::size_t row) { return x + static_cast<std::size_t>(row_token[row]) * n_inner; });
}

void gemm_swiglu_f16(const NativeCall& call, Type type) {
  const auto& args = call.arguments<args::GemmSwigluArgs>();
  const auto* x = call.buffer<const std::uint16_t>(1);
  const Matrix matrices[2] = {{call.buffer<const std::uint8_t>(2), args.weight_row_bytes},
                              {call.buffer<const std::uint8_t>(3), args.weight_row_bytes}};
  auto* h = call.buffer<std::uint16_t>(4);
  auto* saturated = call.buffer<std::uint64_t>(5);
  const PanelGemm gemm(call.kernels, type, Operand::Half, call.precision, args.n_inner);
  dense_product(
      call.pool, gemm, args.n_rows, args.n_cols, 2, [&](std::size_t row) { return x + row * args.n_inner; },
      [&](std::size_t part, std::size_t column) { return matrices[part].row(column); },
      [&](std::size_t row, std::size_t count, std::size_t column, std::size_t columns, float* sums) {
        count_saturated(saturated, write_swiglu(call.kernels, sums, count, columns, args.gate_scale, args.up_scale,
                                                h + row * args.n_cols + column, args.n_cols));
      });
}

void gemm_grouped_swiglu(const NativeCall& call, Type type) {
  const auto& args = call.arguments<args::GemmArgs>();
  const auto* x = call.buffer<const std::uint16_t>(1);
  const std::uint64_t* tables[2] = {call.buffer<const std::uint64_t>(2), call.buffer<const std::uint64_t>(3)};
  const auto* gate_scale = call.buffer<const float>(4);
  const auto* up_scale = call.buffer<const float>(5);
  const auto* tiles = call.buffer<const std::uint32_t>(6);
  const auto* meta = call.buffer<const std::uint32_t>(7);
  auto* h = call.buffer<std::uint16_t>(8);
  auto* saturated = call.buffer<std::uint64_t>(9);
  const PanelGemm gemm(call.kernels, type, Operand::Half, call.precision, args.n_inner);
  const std::vector<ExpertTask> tasks = expert_tasks(tiles, meta[EXPERTILE_META_TILES], args.n_cols,
                                                     gemm.panel_weights() / 2, gemm.max_rows(), call.pool.threads());
  call.pool.run(tasks.size(), [&](std::size_t index, int worker) {
    const ExpertTask& task = tasks[index];
    Matrix matrices[2];
    for (int part = 0; part < 2; ++part) {
      matrices[part] = {reinterpret_cast<const std::uint8_t*>(tables[part][task.expert]), args.weight_row_bytes};
    }
    std::uint64_t count = 0;
    grouped_task(
        call.pool, worker, gemm, task, 2, [&](std::size_t row) { return x + row * args.n_inner; },
        [&](std::size_t part, std::size_t column) { return matrices[part].row(column); },
        [&](std::size_t column, std::size_t columns, float* sums) {
          count += write_swiglu(call.kernels, sums, task.n_rows, columns, gate_scale[task.expert],
                                up_scale[task.expert], h + task.row * args.n_cols + column, args.n_cols);
        });
    count_saturated(saturated, count);
  });
}

}  // namespace expertile::cpu
