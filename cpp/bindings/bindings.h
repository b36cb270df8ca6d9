// bindings.h: what the parts of the Python module share.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "expertile/device.h"
#include "expertile/error.h"

namespace expertile::bindings {

namespace py = pybind11;

// Bytes of a C-contiguous array in native byte order; throws std::invalid_argument otherwise.
inline std::byte* contiguous_bytes(const py::array& array, const std::string& where, bool writable) {
  if (!(array.flags() & py::array::c_style)) {
    throw std::invalid_argument(expected_got(where, "a C-contiguous array", "another layout"));
  }
  // Of the fields of a structured type, too: bytes written over a Python object's pointer would be followed.
  if (!array.dtype().attr("isnative").cast<bool>() || array.dtype().attr("hasobject").cast<bool>()) {
    throw std::invalid_argument(expected_got(where, "a native number type", std::string(py::str(array.dtype()))));
  }
  if (writable && !array.writeable()) {
    throw std::invalid_argument(expected_got(where, "a writable array", "a read-only one"));
  }
  return static_cast<std::byte*>(const_cast<void*>(array.data()));
}

// Gives the GIL away for its lifetime. A daemon thread that wants it back while the interpreter shuts down is ended by
// Python (before 3.14) by unwinding its stack; here that would end in std::terminate, and in destructors of Python
// objects without the GIL. It sleeps instead until the process is gone.
class GilRelease {
 public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  ~GilRelease() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
    }
  }
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* state_;
};

// A device's warning, if it has one, as Python's own. Call with the GIL.
inline void show_warning(Device& device) {
  const std::string text = device.take_warning();
  if (!text.empty() && PyErr_WarnEx(PyExc_RuntimeWarning, text.c_str(), 1) != 0) throw py::error_already_set();
}

// A file's name as Python has it, whatever its bytes are.
inline py::object path_text(const std::string& path) {
  PyObject* text = PyUnicode_DecodeFSDefaultAndSize(path.data(), static_cast<py::ssize_t>(path.size()));
  if (text == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(text);
}

// What work() gives, which runs on the device without the GIL; a warning of the device's is shown after it.
template <class Work>
auto run_without_gil(Device& device, const Work& work) {
  auto result = [&] {
    const GilRelease release;
    return work();
  }();
  show_warning(device);
  return result;
}

void bind_device(py::module_& m);
void bind_model(py::module_& m);
void bind_window(py::module_& m);
void bind_plan(py::module_& m);
void bind_cuda(py::module_& m);
void bind_metal_standin(py::module_& m);  // tests/metal_standin, where it is built

}  // namespace expertile::bindings
