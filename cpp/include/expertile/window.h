// window.h: the engine: persistent buffers for a chunk of up to max_tokens, and the programs of every layer.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "expertile/config.h"
#include "expertile/device.h"
#include "expertile/program.h"

namespace expertile {

// rows, columns, inner step and simdgroups of one threadgroup's step of a GEMM.
struct Tile {
  std::uint32_t m = 16, n = 64, k = 32, s = 2;
  std::string suffix() const;  // "16_64_32_4"
  bool operator==(const Tile&) const = default;
};

// The tiles that are compiled.
const std::vector<Tile>& tile_table();

// Which neighbouring kernels of a layer run as one; the bits are the same either way.
struct Fusion {
  bool swiglu = false;      // gate, up and SwiGLU of the experts in one grouped kernel
  bool gatherless = false;  // gate and up read the tokens' rows themselves; not together with swiglu
  bool combine = false;     // the weighted sum and the write into the streams in one kernel
  bool operator==(const Fusion&) const = default;
};

struct WindowOptions {
  std::uint32_t max_tokens = 512;
  std::string plan;  // variant; "" = the device's default
  Tile gate_up{};    // tile of the grouped gate and up GEMMs
  Tile down{};       // tile of the grouped down GEMM; same m
  // Of whole layers; a step by itself always runs the unfused kernels. None = the device's default.
  std::optional<Fusion> fusion;
  std::string elementwise;  // "scalar", "vector" (four columns a thread, the same bits); "" = the device's default
  Precision precision = Precision::Exact;  // of the experts' GEMMs, the routed and the shared one's
  bool profile = false;                    // run every launch by itself, so that seconds() knows each step's time
};

// The parts of a layer that can run by themselves, in order.
enum class Step { HcRead, Route, Plan, Gather, Experts, Shared, Combine, HcWrite };
const std::vector<std::string>& step_names();

// `name`: the launch's group, and in a group of several the buffer that it writes; "total" for a whole program.
struct LaunchTime {
  std::string name;
  std::string step;
  std::string kernel;
  double seconds;
};

class Window {
 public:
  // Keeps `model` (its weights are adopted by the device where it can). Builds and checks every layer's program. Throws
  // std::invalid_argument for options that the model or the device does not allow, DeviceError where memory is short or
  // a kernel does not compile.
  Window(std::shared_ptr<const Model> model, std::shared_ptr<Device> device, const WindowOptions& options);
  ~Window();
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  const Model& model() const;
  const WindowOptions& options() const;
  Device& device() const;

  // The MoE half of one layer on the buffer "streams", [n_tokens, C, D] fp32, in place. Returns device seconds, when
  // the device has finished. Before a chunk's first layer: clear_faults; behind its last: route_faults, whose tokens
  // hold nothing that counts. Throws std::invalid_argument for a layer or n_tokens out of range. One call at a time
  // runs.
  double moe_layer(std::uint32_t layer, std::uint32_t n_tokens);
  double run_step(Step step, std::uint32_t layer, std::uint32_t n_tokens);

  // Device seconds of `steps` of a layer, run on what lies in the buffers, with the window's fusion: as one program, or
  // launch by launch; `warm`: after a run that is not timed. The time of a step whose kernel was fused into another's
  // is the other's.
  std::vector<LaunchTime> time_steps(const std::vector<Step>& steps, std::uint32_t layer, std::uint32_t n_tokens,
                                     bool by_launch, bool warm);

  // The program of one layer (or of one step of it), as check_program and `expertile schedule` see it.
  Program build(std::uint32_t layer, std::uint32_t n_tokens, const std::vector<Step>& steps) const;

  // The persistent buffers by name ("streams", "mixed", "ids", "row_token" ...).
  std::vector<std::string> buffer_names() const;
  BufferRef buffer(const std::string& name) const;

  // Tokens that could not be routed since the last clear: token -> layer.
  std::map<std::uint32_t, std::uint32_t> route_faults(std::uint32_t n_tokens);
  void clear_faults(std::uint32_t n_tokens);
  std::uint64_t saturated();  // activations that met the fp16 limit since the window was made

  std::uint64_t memory() const;                   // bytes of the persistent buffers
  std::map<std::string, double> seconds() const;  // by step, since the window was made; waits for a call that runs

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace expertile
