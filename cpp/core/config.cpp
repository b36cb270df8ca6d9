// config.cpp: the limits on a model's sizes, and access to its tensors.
#include "expertile/config.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "expertile/error.h"

namespace expertile {

namespace {

constexpr std::uint32_t kMaxStreams = 16;
// Column counts are 32 bits in the kernels' arguments, and the GPU compilers take them through signed arithmetic.
constexpr std::uint64_t kMaxColumns = std::numeric_limits<std::int32_t>::max();

void require_range(const char* field, std::uint64_t value, std::uint64_t low, std::uint64_t high) {
  if (value >= low && value <= high) return;
  throw std::invalid_argument(
      expected_got(std::string("Config: ") + field, std::to_string(low) + " to " + std::to_string(high), value));
}

}  // namespace

void Config::validate() const {
  require_range("n_layers", n_layers, 1, kMaxColumns);
  require_range("n_streams", n_streams, 1, kMaxStreams);
  require_range("dim", dim, 1, kMaxColumns / n_streams);
  require_range("n_experts", n_experts, 1, kMaxExperts);
  require_range("top_k", top_k, 1, std::min(n_experts, kMaxTopK));
  require_range("shared_ffn", shared_ffn, 1, kMaxColumns);
  require_range("low_rank", low_rank, 1, kMaxColumns);
  if (expert_ffn.size() != n_layers) {
    throw std::invalid_argument(expected_got("Config: expert_ffn",
                                             "one size for each of " + std::to_string(n_layers) + " layers",
                                             std::to_string(expert_ffn.size()) + " sizes"));
  }
  // Gate and up may come fused, as one matrix of twice as many rows.
  for (std::size_t layer = 0; layer < expert_ffn.size(); ++layer) {
    require_range(("expert_ffn[" + std::to_string(layer) + "]").c_str(), expert_ffn[layer], 1, kMaxColumns / 2);
  }
  if (!std::isfinite(rms_eps) || rms_eps <= 0) {
    throw std::invalid_argument(expected_got("Config: rms_eps", "a finite number above 0", rms_eps));
  }
}

std::uint32_t Config::max_expert_ffn() const {
  return expert_ffn.empty() ? 0 : *std::max_element(expert_ffn.begin(), expert_ffn.end());
}

const Tensor* Model::find(const std::string& name) const {
  const auto found = tensors.find(name);
  return found == tensors.end() ? nullptr : &found->second;
}

const Tensor& Model::tensor(const std::string& name) const {
  if (const Tensor* found = find(name)) return *found;
  throw std::invalid_argument(expected_got("Model: " + name, "a tensor of this name", "none"));
}

}  // namespace expertile
