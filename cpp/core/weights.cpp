// weights.cpp: brings one layer's tensors onto a device.
#include "core/layer.h"
#include "expertile/error.h"

namespace expertile {
namespace {

std::string blk(std::uint32_t layer, const char* name) { return "blk." + std::to_string(layer) + "." + name; }

float tensor_scale(const Model& model, const std::string& base) {
  const Tensor* scale = model.find(base + ".scale");
  if (!scale) return 1.0f;
  float value;
  std::memcpy(&value, scale->data, sizeof(value));
  return value;
}

DenseWeight dense(const Model& model, const std::string& base, Device& device) {
  const Tensor& t = model.tensor(base + ".weight");
  DenseWeight w;
  w.buffer = device.alloc(t.bytes, t.data);
  w.type = t.type;
  w.name = t.name;
  w.n_inner = static_cast<std::uint32_t>(t.shape[0]);
  w.n_cols = t.shape.size() > 1 ? static_cast<std::uint32_t>(t.shape[1]) : 1;
  w.row_bytes = t.row_bytes();
  w.scale = tensor_scale(model, base);
  return w;
}

BufferRef upload(Device& device, const void* data, std::uint64_t bytes) {
  BufferRef buffer = device.alloc(bytes);
  device.write(buffer, 0, data, bytes);
  return buffer;
}

// `storage` holds the tensor's bytes; the first of this kind's matrices starts `first` bytes into it.
ExpertWeight experts(const Model& model, const Tensor& t, const BufferRef& storage, std::uint64_t first,
                     std::uint32_t n_cols, const std::string& scale_name, Device& device) {
  ExpertWeight w;
  w.storage = storage;
  w.type = t.type;
  w.name = t.name;
  w.n_inner = static_cast<std::uint32_t>(t.shape[0]);
  w.n_cols = n_cols;
  w.row_bytes = t.row_bytes();
  const std::uint32_t n_experts = model.config.n_experts;
  std::vector<std::uint64_t> table(n_experts);
  for (std::uint32_t e = 0; e < n_experts; ++e) table[e] = storage->address() + first + e * t.matrix_bytes();
  w.table = upload(device, table.data(), table.size() * sizeof(table[0]));
  std::vector<float> scales(n_experts, 1.0f);
  if (const Tensor* scale = model.find(scale_name + ".scale")) {
    std::memcpy(scales.data(), scale->data, n_experts * sizeof(float));
  }
  w.scales = upload(device, scales.data(), scales.size() * sizeof(float));
  return w;
}

void load_experts(const Model& model, std::uint32_t layer, Device& device, LayerWeights& w) {
  const std::uint32_t ffn = model.config.expert_ffn[layer];
  const std::string gate = blk(layer, "ffn_gate_exps"), up = blk(layer, "ffn_up_exps");
  if (const Tensor* fused = model.find(blk(layer, "ffn_gate_up_exps.weight"))) {
    const BufferRef storage = device.alloc(fused->bytes, fused->data);
    w.gate = experts(model, *fused, storage, 0, ffn, gate, device);
    w.up = experts(model, *fused, storage, ffn * fused->row_bytes(), ffn, up, device);
  } else {
    const Tensor &g = model.tensor(gate + ".weight"), &u = model.tensor(up + ".weight");
    w.gate = experts(model, g, device.alloc(g.bytes, g.data), 0, ffn, gate, device);
    w.up = experts(model, u, device.alloc(u.bytes, u.data), 0, ffn, up, device);
  }
  const std::string down = blk(layer, "ffn_down_exps");
  const Tensor& d = model.tensor(down + ".weight");
  w.down = experts(model, d, device.alloc(d.bytes, d.data), 0, model.config.dim, down, device);
}

}  // namespace

LayerWeights load_layer(const Model& model, std::uint32_t layer, Device& device) {
  LayerWeights w;
  w.norm = dense(model, blk(layer, "hc_ffn_norm"), device);
  w.hc_down = dense(model, blk(layer, "hc_ffn_down"), device);
  w.hc_up = dense(model, blk(layer, "hc_ffn_up"), device);
  w.inject = dense(model, blk(layer, "hc_ffn_inject"), device);
  w.router = dense(model, blk(layer, "ffn_gate_inp"), device);
  w.shared_scalar = dense(model, blk(layer, "ffn_gate_inp_shexp"), device);
  w.shared_gate = dense(model, blk(layer, "ffn_gate_shexp"), device);
  w.shared_up = dense(model, blk(layer, "ffn_up_shexp"), device);
  w.shared_down = dense(model, blk(layer, "ffn_down_shexp"), device);
  load_experts(model, layer, device, w);
  return w;
}

}  // namespace expertile
