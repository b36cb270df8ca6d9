// module.cpp: expertile._core. Thin: arrays in and out; the Python package gives them shapes and words.
#include "bindings.h"

namespace py = pybind11;
using namespace expertile;

PYBIND11_MODULE(_core, m) {
  m.doc() = "The C++ engine of expertile.";
  m.attr("__version__") = EXPERTILE_VERSION;
  m.attr("__commit__") = EXPERTILE_COMMIT;
  py::register_exception<GGUFError>(m, "GGUFError", PyExc_RuntimeError).attr("__doc__") =
      "A GGUF file that is broken or holds no model of this engine; the message names the file and the field.";
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const DeviceError& e) {
      PyErr_SetString(PyExc_RuntimeError, e.what());
    }
  });
  bindings::bind_device(m);
  bindings::bind_model(m);
  bindings::bind_window(m);
  bindings::bind_plan(m);
  bindings::bind_cuda(m);
#if defined(EXPERTILE_METAL_STANDIN)
  bindings::bind_metal_standin(m);
#endif
}
