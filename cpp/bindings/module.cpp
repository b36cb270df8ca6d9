// module.cpp: expertile._core. Thin: arrays in and out; the Python package gives them shapes and words.
#include "bindings.h"

namespace py = pybind11;
using namespace expertile;

namespace {

// Messages name files, whose names may be no UTF-8.
void set_error(PyObject* type, const char* what) {
  const py::object text = bindings::path_text(what);
  PyErr_SetObject(type, text.ptr());
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "The C++ engine of expertile.";
  m.attr("__version__") = EXPERTILE_VERSION;
  m.attr("__commit__") = EXPERTILE_COMMIT;
  auto gguf_exception = py::exception<GGUFError>(m, "GGUFError", PyExc_RuntimeError);
  gguf_exception.attr("__doc__") =
      "A GGUF file that is broken or holds no model of this engine; the message names the file and the field.";
  static PyObject* const gguf_error = gguf_exception.release().ptr();
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const DeviceError& e) {
      PyErr_SetString(PyExc_RuntimeError, e.what());
    } catch (const GGUFError& e) {
      set_error(gguf_error, e.what());
    } catch (const std::bad_alloc&) {
      PyErr_SetString(PyExc_MemoryError, expected_got("memory", "more of the system's", "none").c_str());
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
