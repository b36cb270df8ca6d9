// gguf.h: reads GGUF files (one or several shards) by memory mapping, every bound checked against the file's size.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "expertile/config.h"

namespace expertile {

using GGUFArray = std::variant<std::vector<std::uint64_t>, std::vector<std::int64_t>, std::vector<double>,
                               std::vector<bool>, std::vector<std::string>>;
using GGUFValue = std::variant<std::uint64_t, std::int64_t, double, bool, std::string, GGUFArray>;

struct GGUFFile {
  std::vector<std::string> paths;  // the shards, in order
  std::map<std::string, GGUFValue> metadata;
  std::map<std::string, Tensor> tensors;  // only those of types the engine knows
  // tensors of other types: name -> type number. Only an error when the MoE half needs one.
  std::map<std::string, std::uint32_t> unknown_types;
};

// Throws GGUFError naming the file and the field.
GGUFFile read_gguf(const std::string& path);

// The MoE half of a file of architecture qwen4exp: sizes from its keys, tensors checked against them.
Model model_from_gguf(const GGUFFile& file);
Model open_gguf(const std::string& path);

}  // namespace expertile
