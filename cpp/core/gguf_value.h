// gguf_value.h: what gguf.cpp and gguf_model.cpp share: numbers out of metadata values, names of what was found.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "expertile/gguf.h"

namespace expertile {

// The number where `value` is a whole one, of either sign's type, that is not negative.
inline std::optional<std::uint64_t> as_unsigned(const GGUFValue& value) {
  if (const auto* number = std::get_if<std::uint64_t>(&value)) return *number;
  if (const auto* number = std::get_if<std::int64_t>(&value); number && *number >= 0) {
    return static_cast<std::uint64_t>(*number);
  }
  return std::nullopt;
}

// What a value is, for messages: a number as itself, the rest by kind.
inline std::string describe(const GGUFValue& value) {
  if (const auto* number = std::get_if<std::uint64_t>(&value)) return std::to_string(*number);
  if (const auto* number = std::get_if<std::int64_t>(&value)) return std::to_string(*number);
  if (const auto* number = std::get_if<double>(&value)) return std::to_string(*number);
  if (const auto* flag = std::get_if<bool>(&value)) return *flag ? "true" : "false";
  return std::holds_alternative<std::string>(value) ? "a string" : "an array";
}

// Text of a file as it may stand in a message: short, and ASCII.
inline std::string printable(const std::string& text) {
  const bool plain = std::all_of(text.begin(), text.end(), [](char c) { return c >= 0x20 && c < 0x7f; });
  return plain && text.size() <= 64 ? "\"" + text + "\"" : std::to_string(text.size()) + " other bytes";
}

inline std::string describe(const std::vector<std::uint64_t>& shape) {
  std::string text = "{";
  for (std::uint64_t dimension : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(dimension);
  return text + "}";
}

}  // namespace expertile
