// gguf_model.cpp: the MoE half of a qwen4exp model out of a GGUF file: sizes from the keys, tensors checked by them.
#include <limits>
#include <map>
#include <stdexcept>

#include "expertile/config.h"
#include "expertile/error.h"
#include "expertile/gguf.h"
#include "gguf_value.h"

namespace expertile {

namespace {

constexpr const char* kArchitecture = "qwen4exp";
constexpr std::uint64_t kMaxSize = std::numeric_limits<std::int32_t>::max();

using Shape = std::vector<std::uint64_t>;

std::string type_name(std::uint32_t number) {
  if (const TypeInfo* info = find_type(number)) return info->name;
  static const std::map<std::uint32_t, const char*> others = {
      {3, "Q4_1"}, {9, "Q8_1"},   {15, "Q8_K"},  {19, "IQ1_S"}, {24, "I8"},    {25, "I16"},   {26, "I32"}, {27, "I64"},
      {28, "F64"}, {29, "IQ1_M"}, {34, "TQ1_0"}, {35, "TQ2_0"}, {39, "MXFP4"}, {40, "NVFP4"}, {41, "Q1_0"}};
  const auto found = others.find(number);
  const std::string text = "type " + std::to_string(number);
  return found == others.end() ? text : std::string(found->second) + " (" + text + ")";
}

std::string known_types() {
  std::string text;
  for (const TypeInfo& info : type_table()) text += (text.empty() ? "" : ", ") + std::string(info.name);
  return text;
}

// A tensor that a layer needs, or may have.
struct Need {
  std::string name;
  Shape shape;
  bool f32 = false;  // norms and scales, which the kernels read as they are
  bool required = true;
  Shape other_shape = {};  // the same bytes, written otherwise
};

// ggml drops trailing dimensions of 1 when it writes.
bool same_shape(Shape a, Shape b) {
  while (a.size() > 1 && a.back() == 1) a.pop_back();
  while (b.size() > 1 && b.back() == 1) b.pop_back();
  return a == b;
}

class TensorCheck {
 public:
  TensorCheck(const Config& config, const std::map<std::string, Tensor>& tensors,
              const std::map<std::string, std::uint32_t>& unknown_types, std::string where)
      : config_(config), tensors_(tensors), unknown_types_(unknown_types), where_(std::move(where)) {}

  void run() const {
    const std::uint64_t dim = config_.dim, wide = dim * config_.n_streams, rank = config_.low_rank;
    for (std::uint32_t layer = 0; layer < config_.n_layers; ++layer) check_layer(layer);
    check({"output_hc_norm.weight", {wide}, true, false, {dim, config_.n_streams}});
    check({"output_hc_down.weight", {wide, rank}, false, false});
    check({"output_hc_up.weight", {rank, wide}, false, false});
    if (const auto found = tensors_.find("token_embd.weight"); found != tensors_.end()) {
      const Shape& shape = found->second.shape;
      if (shape.empty() || shape.size() > 2 || shape[0] != dim) {
        fail(found->first, "shape {" + std::to_string(dim) + ", vocabulary}", describe(shape));
      }
    }
  }

 private:
  bool present(const std::string& name) const { return tensors_.contains(name) || unknown_types_.contains(name); }

  [[noreturn]] void fail(const std::string& name, const std::string& expected, const std::string& got) const {
    const auto found = tensors_.find(name);
    const bool in_file = found != tensors_.end() && !found->second.path.empty();
    throw GGUFError(expected_got((in_file ? found->second.path : where_) + ": " + name, expected, got));
  }

  void check(const Need& need) const {
    if (const auto unknown = unknown_types_.find(need.name); unknown != unknown_types_.end()) {
      fail(need.name, "one of the types " + known_types(), type_name(unknown->second));
    }
    const auto found = tensors_.find(need.name);
    if (found == tensors_.end()) {
      if (need.required) fail(need.name, "a tensor of shape " + describe(need.shape), "none");
      return;
    }
    const Tensor& tensor = found->second;
    const bool shaped = same_shape(tensor.shape, need.shape) ||
                        (!need.other_shape.empty() && same_shape(tensor.shape, need.other_shape));
    if (!shaped) fail(need.name, "shape " + describe(need.shape), describe(tensor.shape));
    if (need.f32 && tensor.type != Type::F32) fail(need.name, "type F32", type_info(tensor.type).name);
    try {
      const std::uint64_t bytes = tensor_bytes(tensor.type, tensor.shape, where_ + ": " + need.name);
      if (tensor.bytes != bytes) fail(need.name, std::to_string(bytes) + " bytes", std::to_string(tensor.bytes));
    } catch (const std::invalid_argument& error) {
      throw GGUFError(error.what());
    }
    if (tensor.data == nullptr) fail(need.name, "its data in memory", "none");
  }

  void check_layer(std::uint32_t layer) const {
    const std::string prefix = "blk." + std::to_string(layer) + ".";
    const std::uint64_t dim = config_.dim, streams = config_.n_streams, wide = dim * streams, rank = config_.low_rank;
    const std::uint64_t experts = config_.n_experts, ffn = config_.expert_ffn[layer], shared = config_.shared_ffn;
    check({prefix + "hc_ffn_norm.weight", {wide}, true, true, {dim, streams}});
    check({prefix + "hc_ffn_down.weight", {wide, rank}});
    check({prefix + "hc_ffn_up.weight", {rank, wide}});
    check({prefix + "hc_ffn_inject.weight", {wide, streams}});
    check({prefix + "ffn_gate_inp.weight", {dim, experts}});
    check_gate_up(prefix, ffn);
    check({prefix + "ffn_down_exps.weight", {ffn, dim, experts}});
    check({prefix + "ffn_gate_inp_shexp.weight", {dim}, true});
    check({prefix + "ffn_gate_shexp.weight", {dim, shared}});
    check({prefix + "ffn_up_shexp.weight", {dim, shared}});
    check({prefix + "ffn_down_shexp.weight", {shared, dim}});
    for (const char* part : {"ffn_gate", "ffn_up", "ffn_down"}) {
      check({prefix + part + "_exps.scale", {experts}, true, false});
      check({prefix + part + "_shexp.scale", {1}, true, false});
    }
    refuse_unread(prefix);
  }

  void check_gate_up(const std::string& prefix, std::uint64_t ffn) const {
    const std::uint64_t dim = config_.dim, experts = config_.n_experts;
    const std::string gate = prefix + "ffn_gate_exps.weight", up = prefix + "ffn_up_exps.weight";
    const std::string fused = prefix + "ffn_gate_up_exps.weight";
    if (!present(fused)) {
      check({gate, {dim, ffn, experts}});
      check({up, {dim, ffn, experts}});
      return;
    }
    for (const std::string& name : {gate, up}) {
      if (present(name)) fail(name, "no such tensor beside ffn_gate_up_exps", "both");
    }
    check({fused, {dim, 2 * ffn, experts}});
  }

  // A factor or a term that the engine does not apply would change every result without a word.
  void refuse_unread(const std::string& prefix) const {
    static const char* const names[] = {"exp_probs_b.bias",        "exp_probs_b.weight",       "ffn_gate_inp.bias",
                                        "ffn_gate_inp.scale",      "ffn_gate_exps.bias",       "ffn_up_exps.bias",
                                        "ffn_down_exps.bias",      "ffn_gate_up_exps.bias",    "ffn_gate_shexp.bias",
                                        "ffn_up_shexp.bias",       "ffn_down_shexp.bias",      "ffn_gate_up_exps.scale",
                                        "ffn_gate_inp_shexp.bias", "ffn_gate_inp_shexp.scale", "hc_ffn_norm.bias",
                                        "hc_ffn_down.bias",        "hc_ffn_up.bias",           "hc_ffn_inject.bias",
                                        "hc_ffn_down.scale",       "hc_ffn_up.scale",          "hc_ffn_inject.scale"};
    for (const char* name : names) {
      if (present(prefix + name)) fail(prefix + name, "no such tensor in this architecture", "one");
    }
  }

  const Config& config_;
  const std::map<std::string, Tensor>& tensors_;
  const std::map<std::string, std::uint32_t>& unknown_types_;
  std::string where_;
};

// The keys of the architecture in one file.
class Keys {
 public:
  explicit Keys(const GGUFFile& file) : file_(file), where_(file.paths.empty() ? "model" : file.paths.front()) {}

  [[noreturn]] void fail(const std::string& key, const std::string& expected, const std::string& got) const {
    throw GGUFError(expected_got(where_ + ": " + key, expected, got));
  }

  const GGUFValue* find(const std::string& key) const {
    const auto found = file_.metadata.find(key);
    return found == file_.metadata.end() ? nullptr : &found->second;
  }

  const GGUFValue& value(const std::string& key, const std::string& expected) const {
    const GGUFValue* found = find(key);
    if (found == nullptr) fail(key, expected, "no such key");
    return *found;
  }

  std::uint32_t as_size(const std::string& key, const GGUFValue& value, std::uint64_t low, std::uint64_t high) const {
    const auto number = as_unsigned(value);
    if (!number || *number < low || *number > high) {
      fail(key, "a whole number from " + std::to_string(low) + " to " + std::to_string(high), describe(value));
    }
    return static_cast<std::uint32_t>(*number);
  }

  std::uint32_t size(const std::string& name, std::uint64_t high = kMaxSize) const {
    const std::string key = full(name);
    return as_size(key, value(key, "a whole number"), 1, high);
  }

  // One size for all of `count` layers, or one for each.
  std::vector<std::uint32_t> sizes(const std::string& name, std::uint32_t count) const {
    const std::string key = full(name);
    const GGUFValue& found = value(key, "a whole number, or an array of them");
    const auto* array = std::get_if<GGUFArray>(&found);
    if (array == nullptr) return std::vector<std::uint32_t>(count, as_size(key, found, 1, kMaxSize));
    std::vector<GGUFValue> values;
    if (const auto* numbers = std::get_if<std::vector<std::uint64_t>>(array)) {
      values.assign(numbers->begin(), numbers->end());
    } else if (const auto* signed_numbers = std::get_if<std::vector<std::int64_t>>(array)) {
      values.assign(signed_numbers->begin(), signed_numbers->end());
    } else {
      fail(key, "an array of whole numbers", "an array of another type");
    }
    if (values.size() != count) {
      fail(key, std::to_string(count) + " elements, one for each block", std::to_string(values.size()));
    }
    std::vector<std::uint32_t> result;
    for (const GGUFValue& element : values) result.push_back(as_size(key, element, 1, kMaxSize));
    return result;
  }

  float positive(const std::string& name) const {
    const std::string key = full(name);
    const GGUFValue& found = value(key, "a floating-point number");
    const auto* number = std::get_if<double>(&found);
    // Compared so that NaN fails too.
    if (number == nullptr || !(*number >= std::numeric_limits<float>::min() && *number <= 1.0)) {
      fail(key, "a floating-point number above 0, at most 1", describe(found));
    }
    return static_cast<float>(*number);
  }

  static std::string full(const std::string& name) { return std::string(kArchitecture) + "." + name; }
  const std::string& where() const { return where_; }

 private:
  const GGUFFile& file_;
  std::string where_;
};

Config config_from_keys(const GGUFFile& file, const Keys& keys) {
  Config config;
  // Every block has tensors: bounds the count before anything is sized by it.
  const std::uint32_t n_blocks = keys.size("block_count", file.tensors.size() + file.unknown_types.size());
  const std::string draft_key = Keys::full("nextn_predict_layers");
  const GGUFValue* draft = keys.find(draft_key);
  const std::uint32_t n_draft = draft == nullptr ? 0 : keys.as_size(draft_key, *draft, 0, n_blocks - 1);
  config.n_layers = n_blocks - n_draft;
  config.n_streams = keys.size("hyper_connection.count");
  config.dim = keys.size("embedding_length");
  config.n_experts = keys.size("expert_count", kMaxExperts);
  config.top_k = keys.size("expert_used_count", std::min(config.n_experts, kMaxTopK));
  config.expert_ffn = keys.sizes("expert_feed_forward_length", n_blocks);
  config.expert_ffn.resize(config.n_layers);
  config.shared_ffn = keys.size("expert_shared_feed_forward_length");
  config.low_rank = keys.size("hyper_connection.low_rank");
  config.rms_eps = keys.positive("attention.layer_norm_rms_epsilon");
  try {
    config.validate();
  } catch (const std::invalid_argument& error) {
    throw GGUFError("[" + keys.where() + ": " + std::string(error.what()).substr(sizeof("[Config: ") - 1));
  }
  return config;
}

}  // namespace

void Model::validate_tensors() const {
  const bool in_file = !tensors.empty() && !tensors.begin()->second.path.empty();
  TensorCheck(config, tensors, {}, in_file ? tensors.begin()->second.path : "model").run();
}

Model model_from_gguf(const GGUFFile& file) {
  const Keys keys(file);
  const GGUFValue& architecture = keys.value("general.architecture", kArchitecture);
  const auto* name = std::get_if<std::string>(&architecture);
  if (name == nullptr || *name != kArchitecture) {
    keys.fail("general.architecture", kArchitecture, name == nullptr ? describe(architecture) : printable(*name));
  }
  Model model;
  model.config = config_from_keys(file, keys);
  TensorCheck(model.config, file.tensors, file.unknown_types, keys.where()).run();
  model.tensors = file.tensors;
  return model;
}

Model open_gguf(const std::string& path) { return model_from_gguf(read_gguf(path)); }

}  // namespace expertile
