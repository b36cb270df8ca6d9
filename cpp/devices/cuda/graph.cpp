#include "devices/cuda/graph.h"

#include <algorithm>
#include <set>

#include "devices/cuda/kernels.h"
#include "expertile/error.h"

namespace expertile::cuda {
namespace {

constexpr std::uint32_t kMaxGridY = 65535;
constexpr std::uint32_t kMaxGridX = 0x7fffffff;

struct OwnedGraph {
  Handle handle = nullptr;
  ~OwnedGraph() {
    if (handle) driver().graph_destroy(handle);
  }
};

std::string place(const Program& program, const Launch& launch) { return program.name + ": " + launch.kernel; }

// Rows of threadgroups beyond CUDA's 65,535 go to z; the entry point leaves where it is past `rows`.
KernelNode node_of(const Program& program, const Launch& launch, std::uint32_t& rows) {
  const auto& kernel = *static_cast<const Kernel*>(launch.pipeline);
  const auto& size = launch.grid.indirect ? launch.grid.max_grid : launch.grid.size;
  if (size[0] == 0 || size[1] == 0 || size[2] != 1 || size[0] > kMaxGridX || size[1] > kMaxGridY * kMaxGridY) {
    throw DeviceError(
        expected_got(place(program, launch), "a grid [x >= 1, y >= 1, 1]",
                     std::to_string(size[0]) + " x " + std::to_string(size[1]) + " x " + std::to_string(size[2])));
  }
  rows = size[1];
  KernelNode node{};
  node.function = kernel.function;
  node.grid_x = size[0];
  node.grid_z = (rows + kMaxGridY - 1) / kMaxGridY;
  node.grid_y = (rows + node.grid_z - 1) / node.grid_z;
  node.block_x = kernel.threads;
  node.block_y = node.block_z = 1;
  return node;
}

Handle add_launch(Handle graph, const Program& program, const Launch& launch, const std::vector<Handle>& after) {
  std::uint32_t rows = 0;
  KernelNode node = node_of(program, launch, rows);
  std::vector<std::uint64_t> addresses;
  for (const Binding& binding : launch.buffers) addresses.push_back(binding.buffer->address() + binding.offset);
  std::vector<void*> parameters = {const_cast<std::byte*>(launch.args.data())};
  for (std::uint64_t& address : addresses) parameters.push_back(&address);
  parameters.push_back(&rows);
  node.parameters = parameters.data();
  Handle handle = nullptr;
  driver().check(driver().graph_kernel(&handle, graph, after.data(), after.size(), &node), place(program, launch));
  return handle;
}

// Whether it reads, ahead of its wait, what the launch before writes. What still earlier launches wrote is there: the
// launch before has let this one begin behind its own wait.
bool reads_too_early(const Launch& launch, const Launch& before) {
  const unsigned early = static_cast<const Kernel*>(launch.pipeline)->early;
  for (std::size_t i = 0; i < launch.buffers.size(); ++i) {
    if ((early >> i & 1u) == 0) continue;
    const std::uint64_t from = launch.buffers[i].buffer->address() + launch.buffers[i].offset;
    for (const Binding& other : before.buffers) {
      const std::uint64_t start = other.buffer->address() + other.offset;
      const bool apart = start + other.bytes <= from || from + launch.buffers[i].bytes <= start;
      if (other.access != Access::Read && !apart) return true;
    }
  }
  return false;
}

// `early`: behind a group of one launch the next launches are brought up before it ends, and wait on the GPU.
void add_groups(Handle graph, const Program& program, bool early) {
  const Driver& d = driver();
  std::vector<Handle> before;
  const Launch* last = nullptr;  // of the group before
  for (const Group& group : program.groups) {
    const bool one = early && before.size() == 1;
    if (before.size() > 1 && group.launches.size() > 1) {  // n + m edges instead of n * m
      Handle join = nullptr;
      d.check(d.graph_empty(&join, graph, before.data(), before.size()), program.name + ": " + group.name);
      before = {join};
    }
    std::vector<Handle> nodes;
    for (const Launch& launch : group.launches) {
      const bool edges = one && !reads_too_early(launch, *last);
      nodes.push_back(add_launch(graph, program, launch, edges ? std::vector<Handle>{} : before));
      if (edges) {
        d.check(d.graph_edges(graph, &before[0], &nodes.back(), &kProgrammaticEdge, 1), place(program, launch));
      }
    }
    if (nodes.empty()) continue;
    before = std::move(nodes);
    last = &group.launches.back();
  }
}

Handle instantiate(const Program& program, bool early, Result& result) {
  const Driver& d = driver();
  OwnedGraph graph;
  d.check(d.graph_create(&graph.handle, 0), program.name + ": graph");
  add_groups(graph.handle, program, early);
  Handle executable = nullptr;
  result = d.graph_instantiate(&executable, graph.handle, 0);
  return executable;
}

std::string kernels_of(const Program& program) {
  std::set<std::string> names;
  for (const Group& group : program.groups) {
    for (const Launch& launch : group.launches) names.insert(launch.kernel);
  }
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

}  // namespace

Graph::Graph(ContextRef context, const Program& program) : context_(std::move(context)) {
  const Driver& d = driver();
  Result result = kSuccess;
  // Programmatic launch needs compute capability 9.0 and the entry points' griddepcontrol.wait, compiled from there on.
  const bool early = d.graph_edges != nullptr && context_->major >= 9;
  executable_ = instantiate(program, early, result);
  if (result != kSuccess && early) executable_ = instantiate(program, false, result);
  d.check(result, program.name + ": graph of " + kernels_of(program));
  try {
    d.check(d.event_create(&start_, 0), "cuda event");
    d.check(d.event_create(&end_, 0), "cuda event");
    d.check(d.graph_upload(executable_, context_->stream), program.name + ": graph upload");
  } catch (...) {
    if (start_) d.event_destroy(start_);
    if (end_) d.event_destroy(end_);
    d.graph_exec_destroy(executable_);
    throw;
  }
}

Graph::~Graph() {
  const Driver& d = driver();
  if (d.context_push(context_->handle) != kSuccess) return;
  d.event_destroy(start_);
  d.event_destroy(end_);
  d.graph_exec_destroy(executable_);
  Handle popped = nullptr;
  d.context_pop(&popped);
}

double Graph::run(const Program& program) const {
  const Driver& d = driver();
  Result result = d.event_record(start_, context_->stream);
  if (result == kSuccess) result = d.graph_launch(executable_, context_->stream);
  if (result == kSuccess) result = d.event_record(end_, context_->stream);
  if (result == kSuccess) result = d.event_wait(end_);
  if (result != kSuccess) {
    throw DeviceError(expected_got("run: " + program.name, "success of " + kernels_of(program), d.words(result)));
  }
  float milliseconds = 0;
  d.check(d.event_elapsed(&milliseconds, start_, end_), "run: " + program.name);
  return static_cast<double>(milliseconds) * 1e-3;
}

}  // namespace expertile::cuda
