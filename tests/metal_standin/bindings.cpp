// bindings.cpp: expertile._core.metal_standin: settings, counts, faults, and the misuses that the tests plant.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "plants.h"
#include "runtime.h"
#include "serve.h"
#include "standin.h"

namespace expertile::bindings {
namespace {

using standin::Counts;
using standin::Settings;

py::dict counts() {
  const Counts& c = standin::counts();
  py::dict all;
  all["libraries"] = c.libraries;
  all["pipelines"] = c.pipelines;
  all["from_archive"] = c.from_archive;
  all["tensor_dispatches"] = c.tensor_dispatches;
  all["dispatches"] = c.dispatches;
  all["barriers"] = c.barriers;
  all["encoders"] = c.encoders;
  all["command_buffers"] = c.command_buffers;
  all["copied_bytes"] = c.copied_bytes;
  all["adopted_bytes"] = c.adopted_bytes;
  return all;
}

}  // namespace

void bind_metal_standin(py::module_& m) {
  py::module_ s = m.def_submodule("metal_standin", "The stand-in for Metal that this build was made with.");
  py::class_<Settings>(s, "Settings")
      .def_readwrite("present", &Settings::present)
      .def_readwrite("os_major", &Settings::os_major)
      .def_readwrite("os_minor", &Settings::os_minor)
      .def_readwrite("family", &Settings::family)
      .def_readwrite("max_threads", &Settings::max_threads)
      .def_readwrite("max_buffer_bytes", &Settings::max_buffer_bytes)
      .def_readwrite("threadgroup_bytes", &Settings::threadgroup_bytes)
      .def_readwrite("no_copy", &Settings::no_copy)
      .def_readwrite("fails_to_compile", &Settings::fails_to_compile)
      .def_readwrite("fails_as_pipeline", &Settings::fails_as_pipeline)
      .def_readwrite("fails_on_the_gpu", &Settings::fails_on_the_gpu);
  s.def("settings", &standin::settings, py::return_value_policy::reference);
  s.def("reset", [] { standin::settings() = Settings(); });
  s.def("counts", &counts);
  s.def("take_faults", &standin::take_faults);
  s.def("living", &standin::living);
  s.def("serve", &standin::serve);
  s.def("run_clear_twice", &standin::run_clear_twice, py::arg("device"), py::arg("one_group"));
  s.def("plants", [] {
    std::vector<std::string> names;
    for (const auto& [name, run] : standin::plants()) names.push_back(name);
    return names;
  });
  s.def("plant", [](const std::string& name) { standin::plants().at(name)(); });
}

}  // namespace expertile::bindings
