// layer.h: one layer's weights on the device, the window's buffers, and the groups that turn one into the other.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "expertile/config.h"
#include "expertile/device.h"
#include "expertile/program.h"
#include "expertile/window.h"

namespace expertile {

// A dense weight matrix on the device.
struct DenseWeight {
  BufferRef buffer;
  Type type = Type::F32;
  std::string name;
  std::uint32_t n_cols = 0;   // outputs
  std::uint32_t n_inner = 0;  // inputs
  std::uint64_t row_bytes = 0;
  float scale = 1.0f;
};

// The experts' matrices of one kind (gate, up or down): a table of 64-bit pointers and a scale by expert.
struct ExpertWeight {
  BufferRef storage;  // keeps what `table` points to
  BufferRef table;
  BufferRef scales;
  Type type = Type::F32;
  std::string name;
  std::uint32_t n_cols = 0;
  std::uint32_t n_inner = 0;
  std::uint64_t row_bytes = 0;
};

struct LayerWeights {
  DenseWeight norm, hc_down, hc_up, inject, router;
  DenseWeight shared_scalar, shared_gate, shared_up, shared_down;
  ExpertWeight gate, up, down;
};

LayerWeights load_layer(const Model& model, std::uint32_t layer, Device& device);

// Everything that persists between chunks, by the name under which people see it.
using NamedBuffers = std::map<std::string, BufferRef>;

NamedBuffers make_buffers(const Config& config, const WindowOptions& options, Device& device);

// The forms of a layer's kernels that are the fastest measured on a kind of device; the bits do not depend on them.
struct LayerForms {
  Fusion fusion;
  bool vector = false;
};
LayerForms default_forms(const std::string& device_kind);

struct LayerContext {
  const Config& config;
  const WindowOptions& options;
  const LayerWeights& weights;
  const NamedBuffers& buffers;
  std::uint32_t layer;
  std::uint32_t n_tokens;
  std::string plan;  // variant
  Fusion fusion;
  bool vector;  // the elementwise kernels take four columns a thread
};

// The groups of the whole layer, by hand, in the order a person reads. `inputs` gets what is there before it starts.
std::vector<Group> layer_groups(const LayerContext& context, std::vector<Binding>* inputs);

}  // namespace expertile
