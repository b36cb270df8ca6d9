// device.cpp: devices, buffers, and one kernel by itself.
#include <tuple>
#include <variant>

#include "arguments.h"
#include "bindings.h"
#include "devices/cpu/kernels.h"
#include "devices/cpu/peak.h"
#include "expertile/metal.h"
#include "expertile/program.h"

namespace expertile::bindings {
namespace {

using Argument = std::variant<BufferRef, py::array>;

BufferRef to_device(Device& device, const py::array& array, const std::string& where) {
  const std::byte* data = contiguous_bytes(array, where, false);
  if (array.nbytes() == 0) throw std::invalid_argument(expected_got(where, "at least one element", "an empty array"));
  const auto bytes = static_cast<std::uint64_t>(array.nbytes());
  const GilRelease release;
  BufferRef buffer = device.alloc(bytes);
  device.write(buffer, 0, data, bytes);
  return buffer;
}

// A kernel's launch; arrays are copied to the device, buffers are used as they are.
Launch make_launch(Device& device, const std::string& kernel, const py::bytes& args,
                   const std::vector<Argument>& arguments, std::array<std::uint32_t, 3> grid,
                   const std::string& precision) {
  const KernelInfo* info = find_kernel(kernel);
  if (!info) throw std::invalid_argument(expected_got("run_kernel", "a kernel's name", kernel));
  if (arguments.size() != info->buffers.size()) {
    throw std::invalid_argument(
        expected_got("run_kernel: " + kernel, std::to_string(info->buffers.size()) + " buffers", arguments.size()));
  }
  Launch launch;
  launch.kernel = kernel;
  launch.grid.size = grid;
  launch.precision = precision_from_name(precision);
  const std::string packed = args;
  launch.args.resize(packed.size());
  std::memcpy(launch.args.data(), packed.data(), packed.size());
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const KernelBuffer& declared = info->buffers[i];
    Binding binding;
    binding.name = declared.name;
    binding.access = declared.is_const ? Access::Read : Access::ReadWrite;
    if (const auto* array = std::get_if<py::array>(&arguments[i])) {
      const std::string where = "run_kernel: " + kernel + ": " + declared.name;
      contiguous_bytes(*array, where, !declared.is_const);
      binding.buffer = to_device(device, *array, where);
    } else {
      binding.buffer = std::get<BufferRef>(arguments[i]);
    }
    binding.bytes = binding.buffer->bytes();
    launch.buffers.push_back(binding);
  }
  return launch;
}

double run_kernel(Device& device, const std::string& kernel, const py::bytes& args,
                  const std::vector<Argument>& arguments, std::array<std::uint32_t, 3> grid,
                  const std::string& precision) {
  const Launch launch = make_launch(device, kernel, args, arguments, grid, precision);
  const KernelInfo* info = find_kernel(kernel);
  Program program;
  program.name = kernel;
  program.groups = {{kernel, {launch}}};
  const double seconds = run_without_gil(device, [&] {
    device.prepare(program);
    return device.run(program);
  });
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const auto* array = std::get_if<py::array>(&arguments[i]);
    if (!array || info->buffers[i].is_const) continue;
    const BufferRef& buffer = launch.buffers[i].buffer;
    device.read(buffer, 0, contiguous_bytes(*array, kernel, true), buffer->bytes());
  }
  return seconds;
}

using KernelCall = std::tuple<std::string, py::bytes, std::vector<Argument>, std::array<std::uint32_t, 3>>;

// Seconds a layer, `repeats` times, of a program in which the calls follow one another, `layers` times over.
std::vector<double> time_kernels(Device& device, const std::vector<KernelCall>& calls, std::uint32_t layers,
                                 std::uint32_t repeats, const std::string& precision) {
  if (layers == 0 || repeats == 0) throw std::invalid_argument(expected_got("time_kernels", "layers, repeats >= 1", 0));
  std::vector<Group> once;
  for (const auto& [kernel, args, buffers, grid] : calls) {
    once.push_back({kernel, {make_launch(device, kernel, args, buffers, grid, precision)}});
  }
  Program program;
  program.name = "time_kernels";
  for (std::uint32_t i = 0; i < layers; ++i) program.groups.insert(program.groups.end(), once.begin(), once.end());
  return run_without_gil(device, [&] {
    device.prepare(program);
    std::vector<double> seconds;
    for (std::uint32_t i = 0; i < repeats; ++i) seconds.push_back(device.run(program) / layers);
    return seconds;
  });
}

constexpr const char* kBufferDoc = R"(Memory of one device; freed with the last reference to it.

bytes    its size, in bytes
address  where it begins, as the device's kernels see it: what a table of expert pointers holds
)";

constexpr const char* kDeviceDoc =
    R"(One device: its memory, and the programs that run on it. `expertile.open_device` opens it.

kind  "metal", "cuda", "cpu" or "emulator"
name  what the machine calls it

Arrays are C-contiguous and in native byte order; a call returns when its copy is done, and other threads run
meanwhile. A server's own memory is best taken through `expertile.DeviceArray`.

Errors: ValueError for a range that ends behind its buffer, an array of another layout or what is no whole number;
TypeError for what is no array or no buffer; RuntimeError for what the device cannot do.

>>> import expertile, numpy as np
>>> device = expertile.open_device("cpu")
>>> buffer = device.upload(np.arange(4, dtype=np.float32))
>>> device.write(buffer, np.array([7], np.float32), offset=4)
>>> array = np.empty(4, np.float32)
>>> device.read(buffer, array)
>>> array.tolist(), buffer.bytes
([0.0, 7.0, 2.0, 3.0], 16)
)";

constexpr const char* kAdoptDoc = R"(Memory of the caller's as a buffer; nothing is copied.

address  a pointer of this GPU (cuda), an address inside a buffer that this device knows (metal), a host pointer (cpu,
         emulator)
bytes    at least 1

The memory stays the caller's, who keeps it as long as the buffer. Raises ValueError for memory that is not this
device's or is shorter; cpu and emulator cannot tell and take the caller's word.
)";

constexpr const char* kStatusDoc = R"(A kind of device, present or not: what `expertile.list_devices` gives.

kind     "metal", "cuda", "cpu" or "emulator"
present  can it be opened here
detail   its name, or why it is absent
)";

void read_array(Device& device, const py::object& source, const py::object& array) {
  const BufferRef from = buffer_argument(source, "Device.read: source");
  const py::array to = array_argument(array, "Device.read: array");
  std::byte* const data = contiguous_bytes(to, "Device.read", true);
  const auto bytes = static_cast<std::uint64_t>(to.nbytes());
  const GilRelease release;
  device.read(from, 0, data, bytes);
}

void write_array(Device& device, const py::object& buffer, const py::object& array, const py::object& offset) {
  const BufferRef to = buffer_argument(buffer, "Device.write: to");
  const py::array from = array_argument(array, "Device.write: array");
  const std::uint64_t at = whole_number(offset, "Device.write: offset");
  const std::byte* const data = contiguous_bytes(from, "Device.write", false);
  const auto bytes = static_cast<std::uint64_t>(from.nbytes());
  const GilRelease release;
  device.write(to, at, data, bytes);
}

BufferRef adopt(Device& device, const py::object& address, const py::object& bytes) {
  return device.adopt(whole_number(address, "Device.adopt: address"), whole_number(bytes, "Device.adopt: bytes"));
}

void copy_buffer(Device& device, const py::object& buffer, const py::object& source, const py::object& bytes) {
  const BufferRef to = buffer_argument(buffer, "Device.copy: to");
  const BufferRef from = buffer_argument(source, "Device.copy: source");
  const std::uint64_t count = whole_number(bytes, "Device.copy: bytes");
  const GilRelease release;
  device.copy(to, 0, from, 0, count);
}

void bind_device_classes(py::module_& m) {
  py::class_<Buffer, BufferRef>(m, "Buffer", kBufferDoc)
      .def_property_readonly("bytes", &Buffer::bytes)
      .def_property_readonly("address", &Buffer::address);
  py::class_<Device, std::shared_ptr<Device>>(m, "Device", kDeviceDoc)
      .def_property_readonly("kind", &Device::kind)
      .def_property_readonly("name", &Device::name)
      .def(
          "upload",
          [](Device& d, const py::object& array) {
            return to_device(d, array_argument(array, "Device.upload: array"), "Device.upload");
          },
          py::arg("array"), "A new buffer with a copy of `array`, which has at least one element.")
      .def(
          "alloc",
          [](Device& d, const py::object& bytes) { return d.alloc(whole_number(bytes, "Device.alloc: bytes")); },
          py::arg("bytes"),
          "A new buffer of at least 1 byte, with any content. Raises ValueError for 0 bytes, RuntimeError where memory "
          "is short, with the size.")
      .def("read", &read_array, py::arg("source"), py::arg("array"),
           "Fills the writable `array` from the beginning of the buffer `source`.")
      .def("write", &write_array, py::arg("to"), py::arg("array"), py::arg("offset") = 0,
           "Copies `array` into the buffer `to`, `offset` bytes behind its beginning.")
      .def("adopt", &adopt, py::arg("address"), py::arg("bytes"), kAdoptDoc)
      .def("copy", &copy_buffer, py::arg("to"), py::arg("source"), py::arg("bytes"),
           "Copies the first bytes of the buffer `source` to the beginning of `to`, another one of this device.")
      .def(
          "wait_for_caller", &Device::wait_for_caller, py::call_guard<GilRelease>(),
          "Waits for all work that others have put on a cuda device, but on the stream that it was opened with: there, "
          "and on other devices, there is nothing to wait for.")
      .def("__repr__", [](const Device& d) { return std::string("<Device ") + d.kind() + ": " + d.name() + ">"; });
  py::class_<DeviceStatus>(m, "DeviceStatus", kStatusDoc)
      .def_readonly("kind", &DeviceStatus::kind)
      .def_readonly("present", &DeviceStatus::present)
      .def_readonly("detail", &DeviceStatus::detail);
}

}  // namespace

void bind_device(py::module_& m) {
  bind_device_classes(m);
  m.def("list_devices", &list_devices);
  m.def("cpu_instructions", &cpu::kernel_names);
  m.def(
      "open_device",
      [](const std::string& kind, int threads, const std::string& order, std::uint64_t seed, bool guard,
         std::optional<std::uint64_t> stream, const std::string& instructions) {
        return open_device(kind, {threads, order, seed, guard, stream, instructions});
      },
      py::arg("kind"), py::arg("threads") = 0, py::arg("order") = "", py::arg("seed") = 0, py::arg("guard") = false,
      py::arg("stream") = py::none(), py::arg("instructions") = "");
  m.def(
      "open_metal_device", [](const std::string& matrix) { return open_metal_device({nullptr, nullptr, matrix}); },
      py::arg("matrix"));
  m.def("run_kernel", &run_kernel, py::arg("device"), py::arg("kernel"), py::arg("args"), py::arg("buffers"),
        py::arg("grid"), py::arg("precision") = "exact");
  m.def("time_kernels", &time_kernels, py::arg("device"), py::arg("calls"), py::arg("layers"), py::arg("repeats"),
        py::arg("precision") = "exact");
  m.def("measure_peak", &measure_peak, py::call_guard<GilRelease>(), py::arg("threads") = 0);
  m.def("kernels", [] {
    py::dict table;
    for (const KernelInfo& info : kernel_table()) {
      py::list buffers;
      for (const KernelBuffer& b : info.buffers) buffers.append(py::make_tuple(b.name, b.is_const));
      py::dict row;
      row["file"] = info.file;
      row["args_bytes"] = info.args_bytes;
      row["threads"] = info.threads;
      row["buffers"] = buffers;
      table[info.name] = row;
    }
    return table;
  });
}

}  // namespace expertile::bindings
