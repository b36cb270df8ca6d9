// context.h: one GPU's primary context with a stream of our own, and what lives in it.
#pragma once

#include <memory>
#include <string>

#include "devices/cuda/driver.h"

namespace expertile::cuda {

// Kept by everything that lives in it (buffers, kernels, graphs), so that none outlives it.
struct Context {
  explicit Context(int ordinal);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  std::string name;
  int major = 0, minor = 0;
  int device = 0;
  Handle handle = nullptr;
  Handle stream = nullptr;
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
