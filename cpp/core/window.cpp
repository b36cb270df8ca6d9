#include "expertile/window.h"

#include <algorithm>
#include <mutex>

#include "core/layer.h"
#include "core/plan.h"
#include "expertile/error.h"

namespace expertile {

std::string Tile::suffix() const {
  return std::to_string(m) + "_" + std::to_string(n) + "_" + std::to_string(k) + "_" + std::to_string(s);
}

const std::vector<Tile>& tile_table() {
  static const std::vector<Tile> tiles = {{16, 32, 32, 4}, {16, 64, 32, 2}, {32, 64, 32, 4}, {64, 64, 32, 4}};
  return tiles;
}

const std::vector<std::string>& step_names() {
  static const std::vector<std::string> names = {"hc_read", "route",  "plan",    "gather",
                                                 "experts", "shared", "combine", "hc_write"};
  return names;
}

namespace {

// The bytes of a program's reads that nothing in it has written: the inputs of a step that runs by itself.
std::vector<Binding> external_reads(const std::vector<Group>& groups) {
  std::vector<Binding> reads;
  for (const Group& group : groups) {
    for (const Launch& launch : group.launches) {
      for (const Binding& b : launch.buffers) {
        if (b.access != Access::Write) reads.push_back(b);
      }
    }
  }
  return reads;
}

Program only_steps(Program program, const std::vector<Step>& steps) {
  for (Group& group : program.groups) {
    std::erase_if(group.launches, [&](const Launch& launch) {
      return std::none_of(steps.begin(), steps.end(),
                          [&](Step step) { return step_names()[static_cast<std::size_t>(step)] == launch.step; });
    });
  }
  std::erase_if(program.groups, [](const Group& group) { return group.launches.empty(); });
  program.inputs = external_reads(program.groups);
  return program;
}

std::string first_written(const Launch& launch) {
  for (const Binding& b : launch.buffers) {
    if (b.access != Access::Read) return b.name;
  }
  return launch.kernel;
}

void check_tile(const Tile& tile, const char* where) {
  const auto& tiles = tile_table();
  if (std::find(tiles.begin(), tiles.end(), tile) != tiles.end()) return;
  std::string list;
  for (const Tile& t : tiles) list += (list.empty() ? "" : ", ") + t.suffix();
  throw std::invalid_argument(expected_got(where, "one of the compiled tiles " + list, tile.suffix()));
}

}  // namespace

struct Window::State {
  std::shared_ptr<const Model> model;
  std::shared_ptr<Device> device;
  WindowOptions options;
  NamedBuffers buffers;
  std::vector<LayerWeights> layers;
  std::map<std::uint32_t, std::pair<std::uint32_t, Program>> programs;  // layer -> (T, program)
  std::map<std::string, double> seconds;
  std::mutex mutex;  // one call at a time

  void check_call(const char* where, std::uint32_t layer, std::uint32_t n_tokens) const {
    if (layer >= layers.size()) {
      throw std::invalid_argument(expected_got(where, "layer < " + std::to_string(layers.size()), layer));
    }
    if (n_tokens > options.max_tokens) {
      throw std::invalid_argument(
          expected_got(where, "at most " + std::to_string(options.max_tokens) + " tokens (max_tokens)", n_tokens));
    }
  }

  Fusion fusion() const { return options.fusion ? *options.fusion : default_forms(device->kind()).fusion; }
  bool vector() const {
    return options.elementwise.empty() ? default_forms(device->kind()).vector : options.elementwise == "vector";
  }

  Program build(std::uint32_t layer, std::uint32_t n_tokens, const Fusion& fusion) const {
    const std::string plan = options.plan.empty() ? default_plan(device->kind(), n_tokens) : options.plan;
    Program program;
    program.name = "layer " + std::to_string(layer);
    program.groups = layer_groups(
        {model->config, options, layers[layer], buffers, layer, n_tokens, plan, fusion, vector()}, &program.inputs);
    return program;
  }

  // The layer's program for this T: built, checked and prepared once, again only when T changes.
  const Program& program(std::uint32_t layer, std::uint32_t n_tokens) {
    auto& [built_for, program] = programs[layer];
    if (built_for != n_tokens) {
      built_for = 0;
      program = build(layer, n_tokens, fusion());
      const std::vector<Fault> faults = check_program(program);
      if (!faults.empty()) {
        throw std::logic_error(expected_got("check_program: " + program.name + ": " + faults[0].where, "no fault",
                                            faults[0].kind + ": " + faults[0].detail));
      }
      device->prepare(program);
      built_for = n_tokens;
    }
    return program;
  }

  // One launch at a time, so that each step's time is known.
  double run_profiled(const Program& whole) {
    double total = 0;
    for (const Group& group : whole.groups) {
      for (const Launch& launch : group.launches) {
        Program part;
        part.name = whole.name;
        part.groups = {{group.name, {launch}}};
        device->prepare(part);
        const double s = device->run(part);
        seconds[launch.step] += s;
        total += s;
      }
    }
    return total;
  }
};

Window::Window(std::shared_ptr<const Model> model, std::shared_ptr<Device> device, const WindowOptions& options)
    : state_(std::make_unique<State>()) {
  const Config& config = model->config;
  config.validate();
  model->validate_tensors();
  if (options.max_tokens == 0 || options.max_tokens > kMaxTokens) {
    throw std::invalid_argument(
        expected_got("Window", "max_tokens in 1.." + std::to_string(kMaxTokens), options.max_tokens));
  }
  check_tile(options.gate_up, "Window: gate_up tile");
  check_tile(options.down, "Window: down tile");
  if (options.gate_up.m != options.down.m) {
    throw std::invalid_argument(expected_got(
        "Window: down tile", "the rows of the gate_up tile, " + std::to_string(options.gate_up.m), options.down.m));
  }
  if (options.fusion && options.fusion->swiglu && options.fusion->gatherless) {
    throw std::invalid_argument(expected_got("Window: fusion", "swiglu or gatherless", "both"));
  }
  if (!options.elementwise.empty() && options.elementwise != "scalar" && options.elementwise != "vector") {
    throw std::invalid_argument(expected_got("Window: elementwise", "scalar or vector", options.elementwise));
  }
  if (options.precision != Precision::Exact && std::string(device->kind()) != "cpu") {
    throw std::invalid_argument(expected_got("Window: precision",
                                             "exact, as the device is not cpu but " + std::string(device->kind()),
                                             precision_name(options.precision)));
  }
  const auto& variants = plan_variants();
  if (!options.plan.empty() && std::find(variants.begin(), variants.end(), options.plan) == variants.end()) {
    throw std::invalid_argument(expected_got("Window", "a plan variant", options.plan));
  }
  state_->model = std::move(model);
  state_->device = std::move(device);
  state_->options = options;
  state_->buffers = make_buffers(config, options, *state_->device);
  for (std::uint32_t layer = 0; layer < config.n_layers; ++layer) {
    state_->layers.push_back(load_layer(*state_->model, layer, *state_->device));
  }
  clear_faults(options.max_tokens);
  const std::uint64_t none = 0;
  state_->device->write(state_->buffers.at("saturated"), 0, &none, sizeof(none));
  for (std::uint32_t layer = 0; layer < config.n_layers; ++layer) state_->program(layer, options.max_tokens);
}

Window::~Window() = default;

const Model& Window::model() const { return *state_->model; }
const WindowOptions& Window::options() const { return state_->options; }
Device& Window::device() const { return *state_->device; }

double Window::moe_layer(std::uint32_t layer, std::uint32_t n_tokens) {
  const std::lock_guard lock(state_->mutex);
  state_->check_call("moe_layer", layer, n_tokens);
  if (n_tokens == 0) return 0;
  const Program& program = state_->program(layer, n_tokens);
  return state_->options.profile ? state_->run_profiled(program) : state_->device->run(program);
}

double Window::run_step(Step step, std::uint32_t layer, std::uint32_t n_tokens) {
  const std::lock_guard lock(state_->mutex);
  state_->check_call("run_step", layer, n_tokens);
  if (n_tokens == 0) return 0;
  Program program = build(layer, n_tokens, {step});
  state_->device->prepare(program);
  const double s = state_->device->run(program);
  state_->seconds[step_names()[static_cast<std::size_t>(step)]] += s;
  return s;
}

Program Window::build(std::uint32_t layer, std::uint32_t n_tokens, const std::vector<Step>& steps) const {
  state_->check_call("build", layer, n_tokens);
  if (n_tokens == 0) throw std::invalid_argument(expected_got("build", "at least 1 token", 0));
  if (steps.empty()) return state_->build(layer, n_tokens, state_->fusion());
  return only_steps(state_->build(layer, n_tokens, {}), steps);
}

std::vector<LaunchTime> Window::time_steps(const std::vector<Step>& steps, std::uint32_t layer, std::uint32_t n_tokens,
                                           bool by_launch, bool warm) {
  const std::lock_guard lock(state_->mutex);
  state_->check_call("time_steps", layer, n_tokens);
  if (n_tokens == 0) return {};
  const auto timed = [&](Program& program) {
    state_->device->prepare(program);
    if (warm) state_->device->run(program);
    return state_->device->run(program);
  };
  Program program = only_steps(state_->build(layer, n_tokens, state_->fusion()), steps);
  if (!by_launch) {
    return {{"total", "", "", timed(program)}};
  }
  std::vector<LaunchTime> times;
  for (const Group& group : program.groups) {
    for (const Launch& launch : group.launches) {
      Program part;
      part.groups = {{group.name, {launch}}};
      const double s = timed(part);
      const std::string name = group.launches.size() == 1 ? group.name : first_written(launch);
      times.push_back({name, launch.step, launch.kernel, s});
    }
  }
  return times;
}

std::vector<std::string> Window::buffer_names() const {
  std::vector<std::string> names;
  for (const auto& [name, buffer] : state_->buffers) names.push_back(name);
  return names;
}

BufferRef Window::buffer(const std::string& name) const {
  const auto found = state_->buffers.find(name);
  if (found == state_->buffers.end())
    throw std::invalid_argument(expected_got("Window.buffer", "a buffer's name", name));
  return found->second;
}

std::map<std::uint32_t, std::uint32_t> Window::route_faults(std::uint32_t n_tokens) {
  state_->check_call("route_faults", 0, n_tokens);
  std::vector<std::uint32_t> status(n_tokens);
  std::map<std::uint32_t, std::uint32_t> faults;
  if (n_tokens == 0) return faults;
  state_->device->read(buffer("status"), 0, status.data(), n_tokens * sizeof(status[0]));
  for (std::uint32_t token = 0; token < n_tokens; ++token) {
    if (status[token] != 0) faults[token] = status[token] - 1;
  }
  return faults;
}

void Window::clear_faults(std::uint32_t n_tokens) {
  state_->check_call("clear_faults", 0, n_tokens);
  const std::vector<std::uint32_t> zeros(n_tokens, 0);
  if (n_tokens > 0) state_->device->write(buffer("status"), 0, zeros.data(), n_tokens * sizeof(zeros[0]));
}

std::uint64_t Window::saturated() {
  const std::lock_guard lock(state_->mutex);
  std::uint64_t count = 0;
  state_->device->read(buffer("saturated"), 0, &count, sizeof(count));
  return count;
}

std::uint64_t Window::memory() const {
  std::uint64_t bytes = 0;
  for (const auto& [name, buffer] : state_->buffers) bytes += buffer->bytes();
  return bytes;
}

std::map<std::string, double> Window::seconds() const {
  const std::lock_guard lock(state_->mutex);
  return state_->seconds;
}

}  // namespace expertile
