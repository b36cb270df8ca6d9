// gemm.h: what the native GEMMs share: their weights, the split into tasks, the walk over the plan's tiles.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "args.h"
#include "devices/cpu/native.h"
#include "devices/cpu/panel_gemm.h"
#include "devices/cpu/thread_pool.h"

namespace expertile::cpu {

// A weight matrix: output n's weights start at data + n * row_bytes.
struct Matrix {
  const std::uint8_t* data;
  std::uint64_t row_bytes;
  const std::uint8_t* row(std::size_t n) const { return data + n * row_bytes; }
};

// Rows row .. row + n_rows of one expert by its outputs column .. column + n_columns.
struct ExpertTask {
  std::uint32_t expert;
  std::size_t row;
  std::size_t n_rows;
  std::size_t column;
  std::size_t n_columns;
};

// The real rows of the plan's tiles, merged by expert, then cut: each task about as much work as another, its columns
// a multiple of `panel`, next to each other, its rows at most max_rows.
std::vector<ExpertTask> expert_tasks(const std::uint32_t* tiles, std::uint32_t n_tiles, std::size_t n_columns,
                                     std::size_t panel, std::size_t max_rows, int threads);

// One worker's memory for a task: a block of rows in fp32, a panel's sums, what PanelGemm needs.
struct TaskScratch {
  float* block;
  float* sums;
  std::byte* rest;
  static TaskScratch take(ThreadPool& pool, int worker, const PanelGemm& gemm, std::size_t n_rows, std::size_t n_sums);
};

// All panels of columns begin..end over one block of rows, whatever a column's weights are: weights(column, pointers)
// gives `per_column` rows of them, and emit(first column, columns, sums) gets sums [count][per_column][columns], its
// own to change.
template <class Weights, class Emit>
void for_panels(const PanelGemm& gemm, PanelGemm::Panel panel, std::size_t begin, std::size_t end,
                std::size_t per_column, std::byte* scratch, const Weights& weights, const Emit& emit) {
  const std::size_t most = std::max<std::size_t>(1, gemm.panel_weights(panel.n_rows) / per_column);
  std::vector<const std::uint8_t*> pointers(most * per_column);
  panel.weights = pointers.data();
  for (std::size_t first = begin; first < end; first += most) {
    const std::size_t columns = std::min(most, end - first);
    for (std::size_t part = 0; part < per_column; ++part) {
      for (std::size_t i = 0; i < columns; ++i) pointers[part * columns + i] = weights(part, first + i);
    }
    panel.n_weights = static_cast<int>(per_column * columns);
    panel.sums_stride = per_column * columns;
    gemm.multiply(panel, scratch);
    emit(first, columns, panel.sums);
  }
}

// A dense product in blocks of rows, each converted once: convert's source is source(row), the sums go to
// emit(first row, rows, first column, columns, sums).
template <class Source, class Weights, class Emit>
void dense_product(ThreadPool& pool, const PanelGemm& gemm, std::size_t n_rows, std::size_t n_columns,
                   std::size_t per_column, const Source& source, const Weights& weights, const Emit& emit) {
  const auto wanted = static_cast<std::size_t>(pool.threads()) * 4;
  for (std::size_t first = 0; first < n_rows; first += gemm.max_rows()) {
    const std::size_t rows = std::min(gemm.max_rows(), n_rows - first);
    const std::size_t most = std::max<std::size_t>(1, gemm.panel_weights(rows) / per_column);
    auto* block = reinterpret_cast<float*>(pool.shared_scratch(gemm.block_floats(rows) * sizeof(float)));
    constexpr std::size_t kUnit = PanelGemm::kRowUnit;
    const std::size_t units = (rows + kUnit - 1) / kUnit;
    pool.run(units, [&](std::size_t unit, int) {
      gemm.convert_rows([&](std::size_t row) { return source(first + row); }, unit * kUnit,
                        std::min(rows, (unit + 1) * kUnit), rows, block);
    });
    // Columns first: their weights are decoded once. Rows are cut as well where there are too few columns.
    const std::size_t panels = (n_columns + most - 1) / most;
    const std::size_t column_tasks = std::min(panels, wanted);
    const std::size_t row_tasks = std::max<std::size_t>(1, std::min(wanted / column_tasks, rows / kUnit));
    pool.run(column_tasks * row_tasks, [&](std::size_t task, int worker) {
      const std::size_t column_task = task / row_tasks, row_task = task % row_tasks;
      const std::size_t begin = std::min(n_columns, panels * column_task / column_tasks * most);
      const std::size_t end = std::min(n_columns, panels * (column_task + 1) / column_tasks * most);
      const std::size_t row_begin = units * row_task / row_tasks * kUnit;
      const std::size_t count = std::min(rows, units * (row_task + 1) / row_tasks * kUnit) - row_begin;
      const TaskScratch scratch = TaskScratch::take(pool, worker, gemm, 0, count * most * per_column);
      const PanelGemm::Panel panel{nullptr, 0, block, rows, row_begin, count, scratch.sums, 0};
      for_panels(gemm, panel, begin, end, per_column, scratch.rest, weights,
                 [&](std::size_t column, std::size_t columns, float* sums) {
                   emit(first + row_begin, count, column, columns, sums);
                 });
    });
  }
}

// The native kernels of one format; each reads the launch's buffers as metal/kernels/gemm.metal declares them.
void gemm_dense(const NativeCall& call, Type type);
void gemm_dense_fp32(const NativeCall& call);
void gemm_grouped(const NativeCall& call, Type type);
void gemm_grouped_gatherless(const NativeCall& call, Type type);
void gemm_swiglu_f16(const NativeCall& call, Type type);
void gemm_grouped_swiglu(const NativeCall& call, Type type);
void gemm_hc_up(const NativeCall& call, Type type);

}  // namespace expertile::cpu
