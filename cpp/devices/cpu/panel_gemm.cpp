#include "devices/cpu/panel_gemm.h"

#include <algorithm>
#include <cstring>

#include "devices/cpu/prefetch.h"

namespace expertile::cpu {
namespace {

void copy_padded(const void* from, std::size_t n, float* to) {
  std::memcpy(to, from, 4 * n);
  std::fill(to + n, to + padded(n), 0.0f);
}

}  // namespace

PanelGemm::PanelGemm(const Kernels& kernels, Type type, Operand operand, Precision precision, std::size_t n_inner,
                     std::size_t together)
    : kernels_(kernels),
      format_(kernels.format(type)),
      way_(way_of(kernels, operand, precision)),
      exact_(precision == Precision::Exact),
      panel_weights_(std::max(kernels.panel_weights, together)),
      n_inner_(n_inner),
      elements_(type_info(type).elements),
      bytes_(type_info(type).bytes) {}

PanelGemm::Way PanelGemm::way_of(const Kernels& kernels, Operand operand, Precision precision) {
  if (operand == Operand::Float) return Way::Floats;
  if (kernels.tiles != nullptr && (kernels.exact_by_tiles || precision != Precision::Exact)) return Way::Tiles;
  return precision == Precision::Exact ? Way::Halves : Way::Rounded;
}

std::size_t PanelGemm::panel_weights() const {
  return way_ == Way::Tiles ? kernels_.tiles->weights[exact_ ? 1 : 0] : panel_weights_;
}

// Few rows have no panel in memory: the more weights the fewer calls.
std::size_t PanelGemm::panel_weights(std::size_t n_rows) const {
  return is_direct(n_rows) ? kMaxPanel : panel_weights();
}

std::size_t PanelGemm::max_rows() const {
  if (way_ == Way::Tiles) return kernels_.tiles->max_rows;
  const std::size_t fit = kernels_.block_bytes / (padded(n_inner_) * sizeof(float)) / kRowUnit * kRowUnit;
  return std::clamp(fit, kRowUnit, kMaxRows);
}

std::size_t PanelGemm::block_floats(std::size_t n_rows) const {
  return way_ == Way::Tiles ? kernels_.tiles->block_words(n_inner_, n_rows) : n_rows * padded(n_inner_);
}

bool PanelGemm::is_direct(std::size_t n_rows) const {
  return way_ == Way::Halves && n_rows <= static_cast<std::size_t>(kernels_.direct_rows);
}

// Few rows are not cut: the direct dot products walk them from end to end. Else the steps are about equal, and whole
// quant blocks of every format.
std::size_t PanelGemm::inner_step(std::size_t n_rows) const {
  if (is_direct(n_rows)) return padded(n_inner_);
  constexpr std::size_t kBlocks = 256;
  if (n_inner_ <= kernels_.inner_step) return padded(n_inner_);
  const std::size_t most = kernels_.inner_step / kBlocks * kBlocks;
  const std::size_t steps = (n_inner_ + most - 1) / most;
  return ((n_inner_ + steps - 1) / steps + kBlocks - 1) / kBlocks * kBlocks;
}

void PanelGemm::convert_some(const void* const* rows, std::size_t first, std::size_t count, std::size_t n_rows,
                             float* block) const {
  if (way_ != Way::Tiles) {
    for (std::size_t i = 0; i < count; ++i) convert_row(rows[i], first + i, n_rows, block);
    return;
  }
  const std::uint16_t* halves[kRowUnit];
  for (std::size_t i = 0; i < count; ++i) halves[i] = static_cast<const std::uint16_t*>(rows[i]);
  kernels_.tiles->convert_rows(halves, count, n_inner_, first / kRowUnit, reinterpret_cast<std::uint32_t*>(block));
}

void PanelGemm::convert_row(const void* from, std::size_t row, std::size_t n_rows, float* block) const {
  const std::size_t full = inner_step(n_rows);
  for (std::size_t k = 0; k < n_inner_; k += full) {
    const std::size_t n = std::min(full, n_inner_ - k);
    float* to = block + k * n_rows + row * padded(n);
    if (way_ == Way::Floats) {
      copy_padded(static_cast<const float*>(from) + k, n, to);
    } else {
      kernels_.half_row(static_cast<const std::uint16_t*>(from) + k, n, to);
    }
  }
}

std::size_t PanelGemm::scratch_bytes() const {
  if (way_ == Way::Tiles) return kernels_.tiles->scratch_bytes;
  const std::size_t step = std::min(kernels_.inner_step, padded(n_inner_));
  return panel_weights_ * (step + kMaxRows * kLanes) * sizeof(float);
}

void PanelGemm::decode(const Panel& panel, std::size_t k, std::size_t n, float* to) const {
  const std::size_t offset = k / elements_ * bytes_, bytes = n / elements_ * bytes_;
  const std::size_t panel_bytes = panel_weights_ * (n_inner_ / elements_ * bytes_);
  for (int w = 0; w < panel.n_weights; ++w, to += padded(n)) {
    const std::uint8_t* from = panel.weights[w] + offset;
    if (way_ == Way::Floats) {
      copy_padded(from, n, to);
    } else {
      prefetch_behind<kToL2>(from, panel_bytes, bytes);  // the same place in the panel behind this one
      format_.decode(from, n, to);
      if (way_ == Way::Rounded) kernels_.bf16_row(n, to);
    }
  }
}

void PanelGemm::step(const Panel& panel, std::size_t k, std::size_t n, const float* decoded, float* partial) const {
  const auto most_rows = static_cast<std::size_t>(kernels_.micro_rows);
  const std::size_t groups = (panel.count + most_rows - 1) / most_rows;
  const std::size_t stride = padded(n);
  const auto multiply = way_ == Way::Floats ? kernels_.multiply_fp32 : kernels_.multiply;
  MicroStep step{};
  step.weight_stride = step.row_stride = step.n_inner = stride;
  step.sums_stride = panel.sums_stride;
  step.first = k == 0;
  step.last = k + n == n_inner_;
  step.partial = partial;
  for (std::size_t group = 0; group < groups; ++group) {
    const std::size_t begin = panel.count * group / groups;
    step.n_rows = static_cast<int>(panel.count * (group + 1) / groups - begin);
    step.rows = panel.block + k * panel.n_rows + (panel.first_row + begin) * stride;
    for (int w = 0; w < panel.n_weights; w += kernels_.micro_weights) {
      step.n_weights = std::min(kernels_.micro_weights, panel.n_weights - w);
      step.weights = decoded + static_cast<std::size_t>(w) * stride;
      step.sums = panel.sums + begin * panel.sums_stride + w;
      multiply(step);
      step.partial += static_cast<std::size_t>(step.n_rows * step.n_weights) * kLanes;
    }
  }
}

void PanelGemm::multiply(const Panel& panel, std::byte* scratch) const {
  if (way_ == Way::Tiles) {
    const auto* block = reinterpret_cast<const std::uint32_t*>(panel.block);
    kernels_.tiles->multiply({format_, elements_, bytes_, n_inner_, exact_, panel.weights, panel.n_weights, block,
                              panel.n_rows, panel.first_row, panel.count, panel.sums, panel.sums_stride, scratch});
    return;
  }
  if (is_direct(panel.n_rows)) {
    const float* rows = panel.block + panel.first_row * padded(n_inner_);
    format_.direct({panel.weights, panel.n_weights, rows, padded(n_inner_), static_cast<int>(panel.count), n_inner_,
                    panel.sums, panel.sums_stride});
    return;
  }
  const std::size_t full = inner_step(panel.n_rows);
  auto* decoded = reinterpret_cast<float*>(scratch);
  float* partial = decoded + panel_weights_ * std::min(kernels_.inner_step, padded(n_inner_));
  for (std::size_t k = 0; k < n_inner_; k += full) {
    const std::size_t n = std::min(full, n_inner_ - k);
    decode(panel, k, n, decoded);
    step(panel, k, n, decoded, partial);
  }
}

}  // namespace expertile::cpu
