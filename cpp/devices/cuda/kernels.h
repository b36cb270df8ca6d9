// kernels.h: the kernels of one GPU by name: compiled or read from the cache when first asked for, then kept.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "devices/cuda/context.h"

namespace expertile::cuda {

struct Entry;

struct Kernel {
  unsigned threads = 0;  // of a threadgroup
  unsigned early = 0;    // bit i: reads buffer i ahead of its wait for the launch before
  Handle module = nullptr;
  Handle function = nullptr;
};

class Kernels {
 public:
  // `threads` compile at once; 0 = as many as the machine has.
  Kernels(ContextRef context, int threads);
  ~Kernels();
  Kernels(const Kernels&) = delete;
  Kernels& operator=(const Kernels&) = delete;

  // Makes all of them ready; compiles in parallel. Throws DeviceError naming the first that is missing or fails.
  void prepare(const std::vector<std::string>& names);
  // One that prepare() has seen.
  const Kernel& at(const std::string& name) const { return kernels_.at(name); }

 private:
  struct Job;
  std::string key_of(const Entry& entry) const;
  void build(Job& job) const;
  void load(const Job& job);

  ContextRef context_;
  int threads_;
  std::vector<std::string> options_;
  std::map<std::string, Kernel> kernels_;  // nodes stay where they are: launches keep pointers to them
};

}  // namespace expertile::cuda
