// tensor.h: weight types and quantized tensors.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace expertile {

// The numbers are those of GGUF files (ggml_type).
enum class Type : std::uint32_t {
  F32 = 0,
  F16 = 1,
  Q4_0 = 2,
  Q5_0 = 6,
  Q5_1 = 7,
  Q8_0 = 8,
  Q2_K = 10,
  Q3_K = 11,
  Q4_K = 12,
  Q5_K = 13,
  Q6_K = 14,
  IQ2_XXS = 16,
  IQ2_XS = 17,
  IQ3_XXS = 18,
  IQ4_NL = 20,
  IQ3_S = 21,
  IQ2_S = 22,
  IQ4_XS = 23,
  BF16 = 30,
  Q2_0 = 42,
};

// One row of the table of types: quant block of `elements` weights in `bytes` bytes.
struct TypeInfo {
  Type type;
  const char* name;    // "IQ2_XS", as gguf spells it
  const char* suffix;  // "iq2_xs", as the kernels' names spell it
  std::uint32_t elements;
  std::uint32_t bytes;
};

const std::vector<TypeInfo>& type_table();
// nullptr where the engine does not know the type.
const TypeInfo* find_type(std::uint32_t ggml_type);
const TypeInfo* find_type(std::string_view name);
// Throws std::logic_error only for a value that is not in the enum.
const TypeInfo& type_info(Type type);

// A weight tensor. `shape` is in ggml order, fastest dimension first: {D, F, E} holds E matrices of F rows of D.
struct Tensor {
  std::string name;
  Type type = Type::F32;
  std::vector<std::uint64_t> shape;
  const std::byte* data = nullptr;  // host memory; kept alive by `owner`
  std::uint64_t bytes = 0;
  std::shared_ptr<void> owner;  // file mapping or array that holds `data`
  std::string path;             // the file it lies in ("" = none), and where
  std::uint64_t file_offset = 0;

  std::uint64_t elements() const;
  std::uint64_t row_bytes() const;     // bytes of one row of shape[0] weights
  std::uint64_t matrix_bytes() const;  // bytes of one {shape[0], shape[1]} matrix: one expert of a stacked tensor
};

// Bytes of `shape` in `type`. Throws std::invalid_argument where shape[0] is not a multiple of the quant block,
// a dimension is 0, or the size does not fit 63 bits.
std::uint64_t tensor_bytes(Type type, const std::vector<std::uint64_t>& shape, const std::string& where);

}  // namespace expertile
