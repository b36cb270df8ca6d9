// arguments.h: what a caller hands to a binding of any type, taken or refused in the engine's words; pybind11's own
// name every signature, over many lines.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "bindings.h"

namespace expertile::bindings {

// As `shown` in expertile/arrays.py.
inline std::string shown(const py::object& value) {
  const auto text = py::reinterpret_steal<py::object>(PyObject_Repr(value.ptr()));
  const char* const utf8 = text ? PyUnicode_AsUTF8(text.ptr()) : nullptr;  // none for half of a surrogate pair
  if (utf8 == nullptr) PyErr_Clear();
  const std::string words = utf8 == nullptr ? "\n" : utf8;
  if (words.size() <= 80 && words.find('\n') == std::string::npos) return words;
  return std::string("an object of type ") + Py_TYPE(value.ptr())->tp_name;
}

// Any kind of whole number within 64 bits, as `whole` in expertile/arrays.py; throws std::invalid_argument.
inline std::uint64_t whole_number(const py::object& value, const std::string& where) {
  if (!PyBool_Check(value.ptr())) {
    const auto number = py::reinterpret_steal<py::object>(PyNumber_Index(value.ptr()));
    const auto found = number ? PyLong_AsUnsignedLongLong(number.ptr()) : 0;
    if (PyErr_Occurred() == nullptr) return found;
    if (!PyErr_ExceptionMatches(PyExc_TypeError) && !PyErr_ExceptionMatches(PyExc_OverflowError)) {
      throw py::error_already_set();
    }
    PyErr_Clear();
  }
  throw std::invalid_argument(expected_got(where, "0..2^64-1", shown(value)));
}

[[noreturn]] inline void refuse_type(const py::object& value, const std::string& where, const std::string& expected) {
  throw py::type_error(expected_got(where, expected, std::string(Py_TYPE(value.ptr())->tp_name)));
}

inline py::array array_argument(const py::object& value, const std::string& where) {
  if (!py::isinstance<py::array>(value)) refuse_type(value, where, "a NumPy array");
  return py::reinterpret_borrow<py::array>(value);
}

inline BufferRef buffer_argument(const py::object& value, const std::string& where) {
  if (!py::isinstance<Buffer>(value)) refuse_type(value, where, "a buffer of the device");
  return value.cast<BufferRef>();
}

}  // namespace expertile::bindings
