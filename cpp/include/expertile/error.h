// error.h: the two exceptions that the engine throws besides std::invalid_argument (the caller's fault).
//
// std::invalid_argument becomes ValueError in Python, DeviceError RuntimeError, GGUFError expertile.GGUFError.
// Every message reads `[where] expected X, got Y`.
#pragma once

#include <cstdio>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace expertile {

class DeviceError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class GGUFError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Text of a string or a number. No streams: a module that a toolchain linked with a C++ library of its own crashes in
// their locales once another module brings a second one.
template <class Value>
std::string text_of(const Value& value) {
  if constexpr (std::is_floating_point_v<Value>) {
    char text[32];
    std::snprintf(text, sizeof(text), "%g", static_cast<double>(value));
    return text;
  } else if constexpr (std::is_arithmetic_v<Value>) {
    return std::to_string(value);
  } else {
    return std::string(value);
  }
}

// "[where] expected X, got Y" from strings and numbers.
template <class Expected, class Got>
std::string expected_got(const std::string& where, const Expected& expected, const Got& got) {
  return "[" + where + "] expected " + text_of(expected) + ", got " + text_of(got);
}

}  // namespace expertile
