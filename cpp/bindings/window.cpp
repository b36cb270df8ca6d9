// window.cpp: the engine and its programs.
#include "expertile/window.h"

#include "bindings.h"
#include "core/plan.h"

namespace expertile::bindings {
namespace {

using TileTuple = std::array<std::uint32_t, 4>;

Step step_from_name(const std::string& name) {
  const auto& names = step_names();
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (names[i] == name) return static_cast<Step>(i);
  }
  throw std::invalid_argument(expected_got("step", "a step's name", name));
}

py::list faults_to_list(const Program& program) {
  py::list faults;
  for (const Fault& fault : check_program(program)) {
    py::dict row;
    row["kind"] = fault.kind;
    row["where"] = fault.where;
    row["detail"] = fault.detail;
    faults.append(row);
  }
  return faults;
}

py::dict program_to_dict(const Program& program) {
  py::list groups;
  for (const Group& group : program.groups) {
    py::list launches;
    for (const Launch& launch : group.launches) {
      py::list reads, writes;
      for (const Binding& b : launch.buffers) {
        if (b.access != Access::Write) reads.append(b.name);
        if (b.access != Access::Read) writes.append(b.name);
      }
      if (launch.grid.indirect) reads.append("meta (grid)");
      py::dict row;
      row["kernel"] = launch.kernel;
      row["step"] = launch.step;
      row["precision"] = precision_name(launch.precision);
      row["grid"] = launch.grid.indirect ? launch.grid.max_grid : launch.grid.size;
      row["indirect"] = static_cast<bool>(launch.grid.indirect);
      row["reads"] = reads;
      row["writes"] = writes;
      launches.append(row);
    }
    py::dict row;
    row["name"] = group.name;
    row["launches"] = launches;
    groups.append(row);
  }
  py::dict out;
  out["name"] = program.name;
  out["groups"] = groups;
  out["faults"] = faults_to_list(program);
  return out;
}

// The layer's launches, numbered in their order, put into other groups: what check_program says of them.
py::list check_groups(const Window& w, std::uint32_t layer, std::uint32_t n_tokens,
                      const std::vector<std::vector<std::size_t>>& numbers) {
  Program program = w.build(layer, n_tokens, {});
  std::vector<Launch> launches;
  for (const Group& group : program.groups) {
    launches.insert(launches.end(), group.launches.begin(), group.launches.end());
  }
  program.groups.clear();
  for (const auto& members : numbers) {
    Group group;
    group.name = "group " + std::to_string(program.groups.size());
    for (const std::size_t i : members) {
      if (i >= launches.size()) {
        throw std::invalid_argument(expected_got("check_groups", "launch < " + std::to_string(launches.size()), i));
      }
      group.launches.push_back(launches[i]);
    }
    program.groups.push_back(group);
  }
  return faults_to_list(program);
}

std::uint64_t check_bytes(const BufferRef& buffer, const std::string& name, const py::array& array) {
  const auto bytes = static_cast<std::uint64_t>(array.nbytes());
  if (bytes > buffer->bytes()) {
    throw std::invalid_argument(
        expected_got("Window: " + name, "at most " + std::to_string(buffer->bytes()) + " bytes", bytes));
  }
  return bytes;
}

void write_buffer(Window& w, const std::string& name, const py::array& array) {
  const BufferRef buffer = w.buffer(name);
  const std::byte* data = contiguous_bytes(array, name, false);
  const std::uint64_t bytes = check_bytes(buffer, name, array);
  const GilRelease release;
  if (bytes > 0) w.device().write(buffer, 0, data, bytes);
}

void read_buffer(Window& w, const std::string& name, const py::array& array) {
  const BufferRef buffer = w.buffer(name);
  std::byte* data = contiguous_bytes(array, name, true);
  const std::uint64_t bytes = check_bytes(buffer, name, array);
  const GilRelease release;
  if (bytes > 0) w.device().read(buffer, 0, data, bytes);
}

// The buffer's bytes where the host can see them, else None. Keeps the buffer alive.
py::object host_view(Window& w, const std::string& name) {
  const BufferRef buffer = w.buffer(name);
  if (!buffer->host()) return py::none();
  const py::capsule keep(new BufferRef(buffer), [](void* p) { delete static_cast<BufferRef*>(p); });
  return py::array_t<std::uint8_t>(static_cast<py::ssize_t>(buffer->bytes()),
                                   reinterpret_cast<std::uint8_t*>(buffer->host()), keep);
}

Fusion fusion_from_names(const std::vector<std::string>& names) {
  Fusion fusion;
  for (const std::string& name : names) {
    if (name == "swiglu") {
      fusion.swiglu = true;
    } else if (name == "gatherless") {
      fusion.gatherless = true;
    } else if (name == "combine") {
      fusion.combine = true;
    } else {
      throw std::invalid_argument(expected_got("Window: fuse", "swiglu, gatherless, combine", name));
    }
  }
  return fusion;
}

// [(name, step, kernel, seconds)]
py::list time_steps(Window& w, const std::vector<std::string>& names, std::uint32_t layer, std::uint32_t n_tokens,
                    bool by_launch, bool warm) {
  std::vector<Step> steps;
  for (const std::string& name : names) steps.push_back(step_from_name(name));
  const std::vector<LaunchTime> times =
      run_without_gil(w.device(), [&] { return w.time_steps(steps, layer, n_tokens, by_launch, warm); });
  py::list rows;
  for (const LaunchTime& t : times) rows.append(py::make_tuple(t.name, t.step, t.kernel, t.seconds));
  return rows;
}

std::shared_ptr<Window> make_window(std::shared_ptr<const Model> model, std::shared_ptr<Device> device,
                                    std::uint32_t max_tokens, const std::string& plan, const TileTuple& gate_up,
                                    const TileTuple& down, const std::optional<std::vector<std::string>>& fuse,
                                    const std::string& elementwise, const std::string& precision, bool profile) {
  WindowOptions options;
  options.max_tokens = max_tokens;
  options.plan = plan;
  options.gate_up = {gate_up[0], gate_up[1], gate_up[2], gate_up[3]};
  options.down = {down[0], down[1], down[2], down[3]};
  if (fuse) options.fusion = fusion_from_names(*fuse);
  options.elementwise = elementwise;
  options.precision = precision_from_name(precision);
  options.profile = profile;
  const GilRelease release;
  return std::make_shared<Window>(std::move(model), std::move(device), options);
}

}  // namespace

void bind_window(py::module_& m) {
  const auto release = py::call_guard<GilRelease>();
  py::class_<Window, std::shared_ptr<Window>>(m, "Window", "What expertile.Window holds.")
      .def(py::init(&make_window), py::arg("model"), py::arg("device"), py::arg("max_tokens"), py::arg("plan"),
           py::arg("gate_up"), py::arg("down"), py::arg("fuse"), py::arg("elementwise"), py::arg("precision"),
           py::arg("profile"))
      .def(
          "moe_layer",
          [](Window& w, std::uint32_t layer, std::uint32_t n_tokens) {
            return run_without_gil(w.device(), [&] { return w.moe_layer(layer, n_tokens); });
          },
          py::arg("layer"), py::arg("n_tokens"))
      .def("run_step",
           [](Window& w, const std::string& step, std::uint32_t layer, std::uint32_t n_tokens) {
             const Step which = step_from_name(step);
             return run_without_gil(w.device(), [&] { return w.run_step(which, layer, n_tokens); });
           })
      .def("time_steps", &time_steps, py::arg("steps"), py::arg("layer"), py::arg("n_tokens"), py::arg("by_launch"),
           py::arg("warm"))
      .def("program", [](Window& w, std::uint32_t layer,
                         std::uint32_t n_tokens) { return program_to_dict(w.build(layer, n_tokens, {})); })
      .def("check_groups", &check_groups, py::arg("layer"), py::arg("n_tokens"), py::arg("groups"))
      .def("write", &write_buffer, py::arg("name"), py::arg("array"))
      .def("read", &read_buffer, py::arg("name"), py::arg("array"))
      .def("host_view", &host_view, py::arg("name"))
      .def("buffer", &Window::buffer, py::arg("name"))
      .def("buffer_names", &Window::buffer_names)
      .def("route_faults", &Window::route_faults, release)
      .def("clear_faults", &Window::clear_faults, release)
      .def("saturated", &Window::saturated, release)
      .def("memory", &Window::memory)
      .def("seconds", &Window::seconds, release);
  m.def("tiles", [] {
    std::vector<TileTuple> tiles;
    for (const Tile& t : tile_table()) tiles.push_back({t.m, t.n, t.k, t.s});
    return tiles;
  });
  m.def("step_names", &step_names);
  m.def("plan_variants", [] { return plan_variants(); });
  m.def("default_plan", [](const std::string& kind, std::uint32_t n_tokens) { return default_plan(kind, n_tokens); });
}

}  // namespace expertile::bindings
