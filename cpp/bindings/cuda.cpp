// cuda.cpp: the atomic plan as a peer, timed on a CUDA device.
#include "args.h"
#include "bindings.h"
#include "core/plan.h"
#include "devices/cuda/align_peer.h"

namespace expertile::bindings {
namespace {

py::tuple align_peer(Device& device, const py::array& ids, std::uint32_t n_experts, std::uint32_t tile_rows,
                     std::uint32_t layers, std::uint32_t repeats) {
  if (ids.ndim() != 2 || !ids.dtype().is(py::dtype::of<std::int32_t>()) || ids.size() == 0 || layers == 0) {
    throw std::invalid_argument(
        expected_got("time_align_peer", "int32 ids [T, K] and layers >= 1", std::string(py::str(ids.dtype()))));
  }
  const auto* data = reinterpret_cast<const std::int32_t*>(contiguous_bytes(ids, "time_align_peer: ids", false));
  const args::PlanArgs plan = plan_args(static_cast<std::uint32_t>(ids.shape(0)),
                                        static_cast<std::uint32_t>(ids.shape(1)), n_experts, tile_rows, 1, 1);
  const AlignPeer peer = run_without_gil(device, [&] { return time_align_peer(device, data, plan, layers, repeats); });
  return py::make_tuple(
      peer.seconds, py::array_t<std::int32_t>(static_cast<py::ssize_t>(peer.row_entry.size()), peer.row_entry.data()));
}

}  // namespace

void bind_cuda(py::module_& m) {
  m.def("time_align_peer", &align_peer, py::arg("device"), py::arg("ids"), py::arg("n_experts"), py::arg("tile_rows"),
        py::arg("layers"), py::arg("repeats"));
}

}  // namespace expertile::bindings
