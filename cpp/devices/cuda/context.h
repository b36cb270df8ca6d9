// context.h: one GPU's primary context with a stream, our own or the caller's, and what lives in it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "devices/cuda/driver.h"

namespace expertile::cuda {

// Kept by everything that lives in it (buffers, kernels, graphs), so that none outlives it.
struct Context {
  // On the first GPU with a stream of its own, or on the caller's stream and its GPU. Throws std::invalid_argument for
  // a stream of another context than a GPU's primary one.
  explicit Context(std::optional<std::uint64_t> callers_stream);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  std::string name;
  int major = 0, minor = 0;
  int device = 0;
  Handle handle = nullptr;
  Handle stream = nullptr;
  bool owns_stream = true;

 private:
  void adopt_stream(std::uint64_t stream);
};

using ContextRef = std::shared_ptr<Context>;

// Makes a context current on this thread for as long as it lives; a caller's own context comes back afterwards.
class Current {
 public:
  explicit Current(const Context& context) { driver().check(driver().context_push(context.handle), "cuda context"); }
  ~Current() {
    Handle popped = nullptr;
    driver().context_pop(&popped);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
};

}  // namespace expertile::cuda
