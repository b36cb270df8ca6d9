// tensor.cpp: the table of weight types and the sizes of tensors.
#include "expertile/tensor.h"

#include <limits>
#include <stdexcept>

#include "expertile/error.h"

namespace expertile {

namespace {

constexpr std::uint64_t kMaxSize = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
constexpr std::size_t kMaxDimensions = 4;

// The product, or a refusal: sizes stay below 2^63 so that differences of them never wrap either.
std::uint64_t checked_product(std::uint64_t a, std::uint64_t b, const std::string& where) {
  if (a != 0 && b > kMaxSize / a) {
    throw std::invalid_argument(
        expected_got(where, "a size below 2^63", std::to_string(a) + " times " + std::to_string(b)));
  }
  return a * b;
}

}  // namespace

const std::vector<TypeInfo>& type_table() {
  static const std::vector<TypeInfo> table = {
      {Type::F32, "F32", "f32", 1, 4},
      {Type::F16, "F16", "f16", 1, 2},
      {Type::BF16, "BF16", "bf16", 1, 2},
      {Type::Q4_0, "Q4_0", "q4_0", 32, 18},
      {Type::Q5_0, "Q5_0", "q5_0", 32, 22},
      {Type::Q5_1, "Q5_1", "q5_1", 32, 24},
      {Type::Q8_0, "Q8_0", "q8_0", 32, 34},
      {Type::Q2_K, "Q2_K", "q2_k", 256, 84},
      {Type::Q3_K, "Q3_K", "q3_k", 256, 110},
      {Type::Q4_K, "Q4_K", "q4_k", 256, 144},
      {Type::Q5_K, "Q5_K", "q5_k", 256, 176},
      {Type::Q6_K, "Q6_K", "q6_k", 256, 210},
      {Type::IQ2_XXS, "IQ2_XXS", "iq2_xxs", 256, 66},
      {Type::IQ2_XS, "IQ2_XS", "iq2_xs", 256, 74},
      {Type::IQ2_S, "IQ2_S", "iq2_s", 256, 82},
      {Type::IQ3_XXS, "IQ3_XXS", "iq3_xxs", 256, 98},
      {Type::IQ3_S, "IQ3_S", "iq3_s", 256, 110},
      {Type::IQ4_NL, "IQ4_NL", "iq4_nl", 32, 18},
      {Type::IQ4_XS, "IQ4_XS", "iq4_xs", 256, 136},
      {Type::Q2_0, "Q2_0", "q2_0", 64, 18},
  };
  return table;
}

const TypeInfo* find_type(std::uint32_t ggml_type) {
  for (const TypeInfo& info : type_table()) {
    if (static_cast<std::uint32_t>(info.type) == ggml_type) return &info;
  }
  return nullptr;
}

const TypeInfo* find_type(std::string_view name) {
  for (const TypeInfo& info : type_table()) {
    if (info.name == name) return &info;
  }
  return nullptr;
}

const TypeInfo& type_info(Type type) {
  if (const TypeInfo* info = find_type(static_cast<std::uint32_t>(type))) return *info;
  throw std::logic_error(expected_got("type_info", "a type of the table", static_cast<std::uint32_t>(type)));
}

std::uint64_t Tensor::elements() const {
  std::uint64_t count = 1;
  for (std::uint64_t dimension : shape) count = checked_product(count, dimension, name);
  return count;
}

std::uint64_t Tensor::row_bytes() const { return tensor_bytes(type, {shape.empty() ? 1 : shape[0]}, name); }

std::uint64_t Tensor::matrix_bytes() const {
  return checked_product(row_bytes(), shape.size() > 1 ? shape[1] : 1, name);
}

std::uint64_t tensor_bytes(Type type, const std::vector<std::uint64_t>& shape, const std::string& where) {
  const TypeInfo& info = type_info(type);
  if (shape.empty() || shape.size() > kMaxDimensions) {
    throw std::invalid_argument(expected_got(where, "1 to 4 dimensions", shape.size()));
  }
  std::uint64_t count = 1;
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] == 0) {
      throw std::invalid_argument(expected_got(where + ": dimension " + std::to_string(i), "at least 1", 0));
    }
    count = checked_product(count, shape[i], where);
  }
  if (shape[0] % info.elements != 0) {
    throw std::invalid_argument(
        expected_got(where + ": dimension 0",
                     "a multiple of " + std::to_string(info.elements) + ", the quant block of " + info.name, shape[0]));
  }
  return checked_product(count / info.elements, info.bytes, where);
}

}  // namespace expertile
