// cuda.cpp: timing on a CUDA device: one kernel many times over in a program, and the atomic plan as a peer.
#include "args.h"
#include "bindings.h"
#include "core/plan.h"
#include "devices/cuda/align_peer.h"
#include "expertile/program.h"

namespace expertile::bindings {
namespace {

// Seconds a launch, `repeats` times, of a program of `launches` launches of one kernel, a barrier behind each. The
// launches take the sets of buffers in turn, so that a cache does not serve what memory would have to.
std::vector<double> time_kernel(Device& device, const std::string& kernel, const py::bytes& args,
                                const std::vector<std::vector<BufferRef>>& buffer_sets,
                                std::array<std::uint32_t, 3> grid, std::uint32_t launches, std::uint32_t repeats) {
  const KernelInfo* info = find_kernel(kernel);
  if (!info) throw std::invalid_argument(expected_got("time_kernel", "a kernel's name", kernel));
  if (launches == 0 || buffer_sets.empty()) {
    throw std::invalid_argument(expected_got("time_kernel", "launches and buffers", "none"));
  }
  const std::string packed = args;
  Program program;
  program.name = kernel;
  for (std::uint32_t i = 0; i < launches; ++i) {
    const std::vector<BufferRef>& buffers = buffer_sets[i % buffer_sets.size()];
    if (buffers.size() != info->buffers.size()) {
      throw std::invalid_argument(
          expected_got("time_kernel: " + kernel, std::to_string(info->buffers.size()) + " buffers", buffers.size()));
    }
    Launch launch;
    launch.kernel = kernel;
    launch.grid.size = grid;
    launch.args.resize(packed.size());
    std::memcpy(launch.args.data(), packed.data(), packed.size());
    for (std::size_t b = 0; b < buffers.size(); ++b) {
      const Access access = info->buffers[b].is_const ? Access::Read : Access::ReadWrite;
      launch.buffers.push_back({buffers[b], access, 0, buffers[b]->bytes(), info->buffers[b].name});
    }
    program.groups.push_back({kernel, {std::move(launch)}});
  }
  const py::gil_scoped_release release;
  device.prepare(program);
  device.run(program);
  std::vector<double> seconds;
  for (std::uint32_t i = 0; i < repeats; ++i) seconds.push_back(device.run(program) / launches);
  return seconds;
}

py::tuple align_peer(Device& device, const py::array& ids, std::uint32_t n_experts, std::uint32_t tile_rows,
                     std::uint32_t layers, std::uint32_t repeats) {
  if (ids.ndim() != 2 || !ids.dtype().is(py::dtype::of<std::int32_t>()) || ids.size() == 0 || layers == 0) {
    throw std::invalid_argument(
        expected_got("time_align_peer", "int32 ids [T, K] and layers >= 1", std::string(py::str(ids.dtype()))));
  }
  const auto* data = reinterpret_cast<const std::int32_t*>(contiguous_bytes(ids, "time_align_peer: ids", false));
  const args::PlanArgs plan = plan_args(static_cast<std::uint32_t>(ids.shape(0)),
                                        static_cast<std::uint32_t>(ids.shape(1)), n_experts, tile_rows, 1, 1);
  AlignPeer peer;
  {
    const py::gil_scoped_release release;
    peer = time_align_peer(device, data, plan, layers, repeats);
  }
  return py::make_tuple(
      peer.seconds, py::array_t<std::int32_t>(static_cast<py::ssize_t>(peer.row_entry.size()), peer.row_entry.data()));
}

}  // namespace

void bind_cuda(py::module_& m) {
  m.def("time_kernel", &time_kernel, py::arg("device"), py::arg("kernel"), py::arg("args"), py::arg("buffer_sets"),
        py::arg("grid"), py::arg("launches"), py::arg("repeats"));
  m.def("time_align_peer", &align_peer, py::arg("device"), py::arg("ids"), py::arg("n_experts"), py::arg("tile_rows"),
        py::arg("layers"), py::arg("repeats"));
}

}  // namespace expertile::bindings
