// graph.h: a program as a CUDA graph, built once and replayed.
#pragma once

#include "devices/cuda/context.h"
#include "expertile/program.h"

namespace expertile::cuda {

class Graph {
 public:
  // Every launch's `pipeline` is a Kernel of this context. A launch depends on all launches of the group before.
  Graph(ContextRef context, const Program& program);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  // Replays it and waits; seconds between two events around it. The context is current.
  double run(const Program& program) const;

 private:
  ContextRef context_;
  Handle executable_ = nullptr;
  Handle start_ = nullptr, end_ = nullptr;
};

}  // namespace expertile::cuda
