// error.h: the two exceptions that the engine throws besides std::invalid_argument (the caller's fault).
//
// std::invalid_argument becomes ValueError in Python, DeviceError RuntimeError, GGUFError expertile.GGUFError.
// Every message reads `[where] expected X, got Y`.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace expertile {

class DeviceError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class GGUFError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// "[where] expected X, got Y" from any streamable pieces.
template <class Expected, class Got>
std::string expected_got(const std::string& where, const Expected& expected, const Got& got) {
  std::ostringstream text;
  text << "[" << where << "] expected " << expected << ", got " << got;
  return text.str();
}

}  // namespace expertile
