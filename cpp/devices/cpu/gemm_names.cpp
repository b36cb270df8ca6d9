// The native GEMMs by kernel name: gemm_<form>_<format>_<M>_<N>_<K>_<S>, some with an ending.
#include <algorithm>
#include <string_view>
#include <utility>

#include "devices/cpu/gemm.h"

namespace expertile {
namespace {

using FormatKernel = void (*)(const NativeCall&, Type);

template <FormatKernel Kernel, Type Value>
void with_type(const NativeCall& call) {
  Kernel(call, Value);
}

constexpr Type kTypes[] = {Type::F32,   Type::F16,     Type::Q4_0,   Type::Q5_0,    Type::Q5_1,
                           Type::Q8_0,  Type::Q2_K,    Type::Q3_K,   Type::Q4_K,    Type::Q5_K,
                           Type::Q6_K,  Type::IQ2_XXS, Type::IQ2_XS, Type::IQ3_XXS, Type::IQ4_NL,
                           Type::IQ3_S, Type::IQ2_S,   Type::IQ4_XS, Type::BF16,    Type::Q2_0};
constexpr std::size_t kTypeCount = sizeof(kTypes) / sizeof(kTypes[0]);

template <FormatKernel Kernel, std::size_t... I>
NativeKernel of_type(Type type, std::index_sequence<I...>) {
  NativeKernel found = nullptr;
  ((kTypes[I] == type ? (found = with_type<Kernel, kTypes[I]>, 0) : 0), ...);
  return found;
}

template <FormatKernel Kernel>
NativeKernel of_type(Type type) {
  return of_type<Kernel>(type, std::make_index_sequence<kTypeCount>());
}

bool take_prefix(std::string_view& text, std::string_view prefix) {
  if (text.substr(0, prefix.size()) != prefix) return false;
  text.remove_prefix(prefix.size());
  return true;
}

bool take_ending(std::string_view& text, std::string_view ending) {
  if (text.size() < ending.size() || text.substr(text.size() - ending.size()) != ending) return false;
  text.remove_suffix(ending.size());
  return true;
}

// "_16_64_32_2": four numbers.
bool is_tile(std::string_view text) {
  int numbers = 0;
  while (take_prefix(text, "_")) {
    const std::size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
    if (digits == 0) return false;
    text.remove_prefix(digits);
    ++numbers;
  }
  return numbers == 4 && text.empty();
}

struct Form {
  std::string_view prefix;
  std::string_view ending;
  NativeKernel (*of_type)(Type);
};

constexpr Form kForms[] = {
    {"gemm_dense_", "", of_type<cpu::gemm_dense>},
    {"gemm_swiglu_f16_", "", of_type<cpu::gemm_swiglu_f16>},
    {"gemm_grouped_", "", of_type<cpu::gemm_grouped>},
    {"gemm_grouped_", "_gatherless", of_type<cpu::gemm_grouped_gatherless>},
    {"gemm_grouped_swiglu_", "", of_type<cpu::gemm_grouped_swiglu>},
    {"gemm_hc_up_", "", of_type<cpu::gemm_hc_up>},
};

}  // namespace

NativeKernel find_native_gemm(const std::string& name) {
  std::string_view fp32 = name;
  if (take_prefix(fp32, "gemm_dense_fp32") && is_tile(fp32)) return cpu::gemm_dense_fp32;
  for (const Form& form : kForms) {
    std::string_view rest = name;
    if (!take_prefix(rest, form.prefix) || !take_ending(rest, form.ending)) continue;
    for (const TypeInfo& type : type_table()) {
      std::string_view tile = rest;
      if (take_prefix(tile, type.suffix) && is_tile(tile)) return form.of_type(type.type);
    }
  }
  return nullptr;
}

}  // namespace expertile
