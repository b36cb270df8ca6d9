// plan.cpp: the plan by itself, to compare and to time its variants.
#include "core/plan.h"

#include <chrono>

#include "args.h"
#include "bindings.h"
#include "devices/cpu/plan.h"

namespace expertile::bindings {
namespace {

struct PlanRun {
  args::PlanArgs args{};
  PlanBuffers buffers;
  std::vector<std::pair<const char*, BufferRef>> outputs;
};

// Buffers of a plan over ids [T, K], every output filled with the 32-bit word `poison`.
PlanRun prepare_plan(Device& device, const py::array& ids, const py::array& weights, std::uint32_t n_experts,
                     std::uint32_t tile_rows, std::uint32_t poison) {
  if (ids.ndim() != 2 || !ids.dtype().is(py::dtype::of<std::int32_t>())) {
    throw std::invalid_argument(expected_got("plan: ids", "int32 [T, K]", std::string(py::str(ids.dtype()))));
  }
  if (weights.nbytes() != ids.nbytes() || !weights.dtype().is(py::dtype::of<float>())) {
    throw std::invalid_argument(expected_got("plan: weights", "float32 of the shape of ids", "another array"));
  }
  const auto n_tokens = static_cast<std::uint32_t>(ids.shape(0)), top_k = static_cast<std::uint32_t>(ids.shape(1));
  if (n_tokens == 0) throw std::invalid_argument(expected_got("plan: ids", "at least 1 token", 0));
  PlanRun run;
  run.args = plan_args(n_tokens, top_k, n_experts, tile_rows, 10, 40);
  const std::uint64_t rows = run.args.max_rows, entries = run.args.n_entries, blocks = run.args.n_blocks;
  const auto input = [&](const py::array& array, const char* where) {
    BufferRef buffer = device.alloc(entries * 4);
    device.write(buffer, 0, contiguous_bytes(array, where, false), entries * 4);
    return buffer;
  };
  const auto output = [&](const char* name, std::uint64_t bytes) {
    const std::vector<std::uint32_t> words(bytes / 4, poison);
    BufferRef buffer = device.alloc(bytes);
    device.write(buffer, 0, words.data(), bytes);
    run.outputs.emplace_back(name, buffer);
    return buffer;
  };
  run.buffers = {input(ids, "plan: ids"),
                 input(weights, "plan: weights"),
                 output("block_count", blocks * n_experts * 4),
                 output("block_offset", blocks * n_experts * 4),
                 output("expert_offset", (n_experts + 1ull) * 4),
                 output("tiles", rows / tile_rows * 16),
                 output("row_token", rows * 4),
                 output("row_weight", rows * 4),
                 output("position", entries * 4),
                 output("meta", EXPERTILE_META_WORDS * 4)};
  return run;
}

py::dict run_plan(Device& device, const std::string& variant, const py::array& ids, const py::array& weights,
                  std::uint32_t n_experts, std::uint32_t tile_rows, std::uint32_t poison) {
  PlanRun run = prepare_plan(device, ids, weights, n_experts, tile_rows, poison);
  Program program;
  program.name = "plan " + variant;
  program.groups = plan_groups(variant, run.args, run.buffers);
  bool makes_offsets = false;
  for (const Group& group : program.groups) {
    for (const Launch& launch : group.launches) {
      for (const Binding& b : launch.buffers) {
        makes_offsets |= b.buffer == run.buffers.block_offset && b.access != Access::Read;
      }
    }
  }
  run_without_gil(device, [&] {
    device.prepare(program);
    return device.run(program);
  });
  std::array<std::uint32_t, EXPERTILE_META_WORDS> meta{};
  device.read(run.buffers.meta, 0, meta.data(), sizeof(meta));
  py::dict out;
  for (const auto& [key, buffer] : run.outputs) {
    const std::string name = key;
    if (name == "block_offset" && !makes_offsets) continue;
    std::uint64_t words = buffer->bytes() / 4;
    std::vector<py::ssize_t> shape = {static_cast<py::ssize_t>(words)};
    if (name == "tiles") shape = {static_cast<py::ssize_t>(std::min<std::uint64_t>(meta[1], words / 4)), 4};
    if (name.starts_with("row_")) shape = {static_cast<py::ssize_t>(std::min<std::uint64_t>(meta[0], words))};
    if (name.starts_with("block_")) shape = {run.args.n_blocks, n_experts};
    const bool is_float = name == "row_weight", is_signed = name == "row_token" || name == "position";
    const py::dtype type = is_float    ? py::dtype::of<float>()
                           : is_signed ? py::dtype::of<std::int32_t>()
                                       : py::dtype::of<std::uint32_t>();
    py::array array(type, shape);
    if (array.nbytes() > 0) {
      device.read(buffer, 0, array.mutable_data(), static_cast<std::uint64_t>(array.nbytes()));
    }
    out[name.c_str()] = array;
  }
  return out;
}

std::vector<double> time_program(Device& device, Program& program, std::uint32_t layers, std::uint32_t repeats) {
  device.prepare(program);
  device.run(program);
  std::vector<double> seconds;
  for (std::uint32_t i = 0; i < repeats; ++i) seconds.push_back(device.run(program) / layers);
  return seconds;
}

// Seconds a layer, `repeats` times, of a program of `layers` plans, for each kernel by itself and in total.
std::map<std::string, std::vector<double>> time_plan(Device& device, const std::string& variant, const py::array& ids,
                                                     const py::array& weights, std::uint32_t n_experts,
                                                     std::uint32_t tile_rows, std::uint32_t layers,
                                                     std::uint32_t repeats) {
  if (layers == 0 || repeats == 0) throw std::invalid_argument(expected_got("time_plan", "layers, repeats >= 1", 0));
  PlanRun run = prepare_plan(device, ids, weights, n_experts, tile_rows, 0xDEADBEEF);
  const std::vector<Group> once = plan_groups(variant, run.args, run.buffers);
  return run_without_gil(device, [&] {
    std::map<std::string, std::vector<double>> times;
    Program whole;
    for (std::uint32_t i = 0; i < layers; ++i) whole.groups.insert(whole.groups.end(), once.begin(), once.end());
    times["total"] = time_program(device, whole, layers, repeats);
    for (const Group& group : once) {
      for (const Launch& launch : group.launches) {
        Program one;
        for (std::uint32_t i = 0; i < layers; ++i) one.groups.push_back({group.name, {launch}});
        times[launch.kernel] = time_program(device, one, layers, repeats);
      }
    }
    return times;
  });
}

// Seconds of the plain counting sort that only makes positions, `repeats` times, and those positions.
py::tuple time_plan_peer(const py::array_t<std::int32_t, py::array::c_style>& ids, std::uint32_t n_experts,
                         std::uint32_t tile_rows, std::uint32_t repeats) {
  if (ids.ndim() != 2) throw std::invalid_argument(expected_got("time_plan_peer: ids", "int32 [T, K]", "another"));
  py::array_t<std::int32_t> position({ids.shape(0), ids.shape(1)});
  std::vector<double> seconds;
  for (std::uint32_t i = 0; i < repeats; ++i) {
    const auto start = std::chrono::steady_clock::now();
    plan_peer_positions(ids.data(), static_cast<std::uint32_t>(ids.shape(0)), static_cast<std::uint32_t>(ids.shape(1)),
                        n_experts, tile_rows, position.mutable_data());
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return py::make_tuple(seconds, position);
}

}  // namespace

void bind_plan(py::module_& m) {
  m.def("run_plan", &run_plan, py::arg("device"), py::arg("variant"), py::arg("ids"), py::arg("weights"),
        py::arg("n_experts"), py::arg("tile_rows"), py::arg("poison") = 0xDEADBEEFu);
  m.def("time_plan", &time_plan, py::arg("device"), py::arg("variant"), py::arg("ids"), py::arg("weights"),
        py::arg("n_experts"), py::arg("tile_rows"), py::arg("layers"), py::arg("repeats"));
  m.def("time_plan_peer", &time_plan_peer, py::arg("ids"), py::arg("n_experts"), py::arg("tile_rows"),
        py::arg("repeats"));
  m.def("max_rows", [](std::uint32_t n_tokens, std::uint32_t top_k, std::uint32_t n_experts, std::uint32_t tile_rows) {
    return max_rows(n_tokens, top_k, n_experts, tile_rows);
  });
}

}  // namespace expertile::bindings
