// config.h: the sizes of a model and of a layer's MoE half.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "expertile/tensor.h"

namespace expertile {

// Sizes of a model; immutable once validated. The letters behind them are those of the README and of shapes.
struct Config {
  std::uint32_t n_layers = 0;
  std::uint32_t dim = 0;                  // D
  std::uint32_t n_experts = 0;            // E
  std::uint32_t top_k = 0;                // K
  std::vector<std::uint32_t> expert_ffn;  // F, by layer
  std::uint32_t shared_ffn = 0;           // Fs
  std::uint32_t n_streams = 0;            // C
  std::uint32_t low_rank = 0;             // R
  float rms_eps = 1e-6f;

  // The only validator: throws std::invalid_argument naming the field.
  void validate() const;
  std::uint32_t max_expert_ffn() const;
};

// Limits of the engine, checked by validate() and by Window.
inline constexpr std::uint32_t kMaxExperts = 4096;
inline constexpr std::uint32_t kMaxTopK = 32;
inline constexpr std::uint32_t kMaxTokens = 1u << 20;

// A model: sizes and tensors by name. A GGUF file gives one, and so do arrays in memory.
struct Model {
  Config config;
  std::map<std::string, Tensor> tensors;

  // Throws std::invalid_argument naming the tensor that is missing.
  const Tensor& tensor(const std::string& name) const;
  const Tensor* find(const std::string& name) const;
  // Checks that every layer has its tensors, with the shapes that config asks for. Throws GGUFError naming the tensor.
  void validate_tensors() const;
};

}  // namespace expertile
