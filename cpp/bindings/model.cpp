// model.cpp: tensors, models and GGUF files.
#include "bindings.h"
#include "expertile/config.h"
#include "expertile/gguf.h"

namespace expertile::bindings {
namespace {

// A read-only view of a tensor's bytes that keeps them alive.
py::array_t<std::uint8_t> tensor_data(const Tensor& t) {
  auto* keep = new std::shared_ptr<void>(t.owner);
  const py::capsule base(keep, [](void* p) { delete static_cast<std::shared_ptr<void>*>(p); });
  py::array_t<std::uint8_t> view(static_cast<py::ssize_t>(t.bytes), reinterpret_cast<const std::uint8_t*>(t.data),
                                 base);
  view.attr("flags").attr("writeable") = false;
  return view;
}

// The format asks for UTF-8, files hold anything: a byte that is none becomes U+FFFD.
py::object text_of_file(const std::string& bytes) {
  PyObject* text = PyUnicode_DecodeUTF8(bytes.data(), static_cast<py::ssize_t>(bytes.size()), "replace");
  if (text == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(text);
}

template <class Item>
py::object list_of(const std::vector<Item>& items) {
  if constexpr (std::is_same_v<Item, std::string>) {
    py::list texts;
    for (const std::string& item : items) texts.append(text_of_file(item));
    return texts;
  } else {
    return py::cast(items);
  }
}

py::object metadata_value(const GGUFValue& value) {
  return std::visit(
      [](const auto& v) -> py::object {
        using Value = std::decay_t<decltype(v)>;
        if constexpr (std::is_same_v<Value, GGUFArray>) {
          return std::visit([](const auto& items) { return list_of(items); }, v);
        } else if constexpr (std::is_same_v<Value, std::string>) {
          return text_of_file(v);
        } else {
          return py::cast(v);
        }
      },
      value);
}

py::object file_metadata(const GGUFFile& file) {
  py::dict out;
  for (const auto& [key, value] : file.metadata) out[py::str(key)] = metadata_value(value);
  return out;
}

// Holds a Python object from C++ threads: released under the GIL.
std::shared_ptr<void> hold(py::object object) {
  return {new py::object(std::move(object)), [](void* p) {
            const py::gil_scoped_acquire gil;
            delete static_cast<py::object*>(p);
          }};
}

Tensor tensor_from_array(const std::string& name, const std::string& type, const std::vector<std::uint64_t>& shape,
                         const py::array& data) {
  const TypeInfo* info = find_type(std::string_view(type));
  if (!info) throw std::invalid_argument(expected_got(name, "a tensor type", type));
  Tensor t;
  t.name = name;
  t.type = info->type;
  t.shape = shape;
  t.bytes = tensor_bytes(info->type, shape, name);
  t.data = contiguous_bytes(data, name, false);
  if (static_cast<std::uint64_t>(data.nbytes()) != t.bytes) {
    throw std::invalid_argument(expected_got(name, std::to_string(t.bytes) + " bytes", data.nbytes()));
  }
  t.owner = hold(data);
  return t;
}

std::shared_ptr<Model> model_from_tensors(const Config& config, const std::vector<Tensor>& tensors) {
  auto model = std::make_shared<Model>();
  model->config = config;
  model->config.validate();
  for (const Tensor& t : tensors) model->tensors[t.name] = t;
  model->validate_tensors();
  return model;
}

constexpr const char* kTensorDoc =
    R"(A weight tensor of a model: quant blocks, as they lie in the file or in the caller's array.

name         -      str    as in a GGUF file
type         -      str    "IQ2_XS", as gguf spells it
shape        -      tuple  ggml order, fastest dimension first: (D, F, E) holds E matrices of F rows of D weights
bytes        -      int    size of the data
data         bytes  uint8  read-only view, valid as long as any reference to it
path         -      str    the file that it lies in; "" = none
file_offset  -      int    where in that file, in bytes

Errors: ValueError for an unknown type, a shape that its quant block does not divide, or data of another length.

>>> import expertile, numpy as np
>>> from expertile.synth import synthetic_model
>>> model = expertile.Model.from_tensors(*synthetic_model("tiny"))
>>> down = model.tensors["blk.0.ffn_down_exps.weight"]
>>> down.type, down.shape, down.bytes == down.data.nbytes, down.path
('IQ4_NL', (64, 512, 16), True, '')
)";

constexpr const char* kConfigDoc = R"(Sizes of a model. The letters are those of the README and of shapes.

n_layers    int
dim         int    D, columns of a residual stream
n_experts   int    E
top_k       int    K, experts a token
expert_ffn  list   F by layer, rows of an expert's gate and up
shared_ffn  int    Fs, the same of the shared expert
n_streams   int    C, residual streams
low_rank    int    R of the hyper-connection
rms_eps     float  of the RMS norm

>>> import expertile
>>> from expertile.synth import synthetic_model
>>> config = expertile.Model.from_tensors(*synthetic_model("tiny", layers=2)).config
>>> config.n_layers, config.dim, config.n_experts, config.top_k, config.expert_ffn
(2, 512, 16, 4, [64, 64])
)";

}  // namespace

void bind_model(py::module_& m) {
  py::class_<Tensor>(m, "Tensor", kTensorDoc)
      .def(py::init(&tensor_from_array), py::arg("name"), py::arg("type"), py::arg("shape"), py::arg("data"))
      .def_readonly("name", &Tensor::name)
      .def_property_readonly("type", [](const Tensor& t) { return type_info(t.type).name; })
      .def_property_readonly("shape", [](const Tensor& t) { return py::tuple(py::cast(t.shape)); })
      .def_readonly("bytes", &Tensor::bytes)
      .def_property_readonly("path", [](const Tensor& t) { return path_text(t.path); })
      .def_readonly("file_offset", &Tensor::file_offset)
      .def_property_readonly("data", &tensor_data);
  py::class_<Config>(m, "Config", kConfigDoc)
      .def(py::init([](std::uint32_t n_layers, std::uint32_t dim, std::uint32_t n_experts, std::uint32_t top_k,
                       std::vector<std::uint32_t> expert_ffn, std::uint32_t shared_ffn, std::uint32_t n_streams,
                       std::uint32_t low_rank, float rms_eps) {
             return Config{n_layers,   dim,       n_experts, top_k,  std::move(expert_ffn),
                           shared_ffn, n_streams, low_rank,  rms_eps};
           }),
           py::kw_only(), py::arg("n_layers"), py::arg("dim"), py::arg("n_experts"), py::arg("top_k"),
           py::arg("expert_ffn"), py::arg("shared_ffn"), py::arg("n_streams"), py::arg("low_rank"), py::arg("rms_eps"))
      .def("validate", &Config::validate, "Raises ValueError naming the first field that is outside its limits.")
      .def_readonly("n_layers", &Config::n_layers)
      .def_readonly("dim", &Config::dim)
      .def_readonly("n_experts", &Config::n_experts)
      .def_readonly("top_k", &Config::top_k)
      .def_readonly("expert_ffn", &Config::expert_ffn)
      .def_readonly("shared_ffn", &Config::shared_ffn)
      .def_readonly("n_streams", &Config::n_streams)
      .def_readonly("low_rank", &Config::low_rank)
      .def_readonly("rms_eps", &Config::rms_eps);
  py::class_<Model, std::shared_ptr<Model>>(m, "Model", "What expertile.Model holds.")
      .def(py::init(&model_from_tensors), py::arg("config"), py::arg("tensors"))
      .def_readonly("config", &Model::config)
      .def_property_readonly("tensors", [](const Model& model) { return model.tensors; });
  py::class_<GGUFFile>(m, "GGUFFile", "All that a GGUF file says, of any architecture.")
      .def_property_readonly("paths",
                             [](const GGUFFile& file) {
                               py::list paths;
                               for (const std::string& path : file.paths) paths.append(path_text(path));
                               return paths;
                             })
      .def_property_readonly("metadata", &file_metadata)
      .def_property_readonly("tensors", [](const GGUFFile& file) { return file.tensors; })
      .def_readonly("unknown_types", &GGUFFile::unknown_types);
  m.def("read_gguf", &read_gguf, py::arg("path"));
  m.def("open_gguf", [](const std::string& path) { return std::make_shared<Model>(open_gguf(path)); }, py::arg("path"));
  m.def("types", [] {
    py::dict table;
    for (const TypeInfo& t : type_table()) table[t.name] = py::make_tuple(t.suffix, t.elements, t.bytes);
    return table;
  });
}

}  // namespace expertile::bindings
