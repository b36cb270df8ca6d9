// launch_check.cpp: every refusal names the kernel and what it expected.
#include "devices/launch_check.h"

#include <cstring>
#include <stdexcept>

#include "expertile/error.h"

namespace expertile {
namespace {

std::string text(const std::array<std::uint32_t, 3>& grid) {
  return "(" + std::to_string(grid[0]) + ", " + std::to_string(grid[1]) + ", " + std::to_string(grid[2]) + ")";
}

[[noreturn]] void refuse(const Launch& launch, const std::string& expected, const std::string& got) {
  throw std::invalid_argument(expected_got("kernel " + launch.kernel, expected, got));
}

void check_binding(const Launch& launch, const Binding& binding, const KernelBuffer& declared) {
  const std::string name = std::string("buffer ") + declared.name + " (" + binding.name + ")";
  if (binding.buffer == nullptr) refuse(launch, name, "none");
  if (declared.is_const != (binding.access == Access::Read)) {
    refuse(launch, name + (declared.is_const ? " read" : " written"), declared.is_const ? "a write" : "a read");
  }
  const std::uint64_t bytes = binding.buffer->bytes();
  if (binding.offset > bytes || binding.bytes > bytes - binding.offset) {
    refuse(launch, name + " within its " + std::to_string(bytes) + " bytes",
           std::to_string(binding.bytes) + " bytes at " + std::to_string(binding.offset));
  }
}

}  // namespace

void check_exact(const Launch& launch, const char* kind) {
  if (launch.precision == Precision::Exact) return;
  refuse(launch, std::string("precision exact on ") + kind, precision_name(launch.precision));
}

void check_launch(const Launch& launch, const KernelInfo& kernel) {
  if (launch.args.size() != kernel.args_bytes) {
    refuse(launch, "args of " + std::to_string(kernel.args_bytes) + " bytes", std::to_string(launch.args.size()));
  }
  if (launch.buffers.size() != kernel.buffers.size()) {
    refuse(launch, std::to_string(kernel.buffers.size()) + " buffers", std::to_string(launch.buffers.size()));
  }
  for (std::size_t i = 0; i < launch.buffers.size(); ++i) check_binding(launch, launch.buffers[i], kernel.buffers[i]);
  const Grid& grid = launch.grid;
  if (grid.indirect == nullptr) return;
  if (grid.indirect_offset % 4 != 0 || grid.indirect->bytes() < 12 ||
      grid.indirect_offset > grid.indirect->bytes() - 12) {
    refuse(launch, "an indirect grid of 12 bytes within " + std::to_string(grid.indirect->bytes()),
           "offset " + std::to_string(grid.indirect_offset));
  }
}

void check_run(const Launch& launch) {
  const std::array<std::uint32_t, 3>& size = launch.grid.indirect ? launch.grid.max_grid : launch.grid.size;
  for (const std::uint32_t extent : size) {
    if (extent != 0) continue;
    throw DeviceError(expected_got("kernel " + launch.kernel, "a grid of at least (1, 1, 1)", text(size)));
  }
  for (const Binding& binding : launch.buffers) {
    if (binding.bytes == 0) {
      throw DeviceError(expected_got("kernel " + launch.kernel, "bytes in buffer " + binding.name, "none"));
    }
    if (binding.offset > binding.buffer->bytes() || binding.bytes > binding.buffer->bytes() - binding.offset) {
      throw DeviceError(expected_got("kernel " + launch.kernel, "buffer " + binding.name + " within its memory",
                                     std::to_string(binding.bytes) + " bytes at " + std::to_string(binding.offset)));
    }
  }
}

std::array<std::uint32_t, 3> resolve_grid(const Launch& launch) {
  if (launch.grid.indirect == nullptr) return launch.grid.size;
  std::array<std::uint32_t, 3> grid{};
  std::memcpy(grid.data(), launch.grid.indirect->host() + launch.grid.indirect_offset, sizeof(grid));
  for (std::size_t i = 0; i < 3; ++i) {
    if (grid[i] < 1 || grid[i] > launch.grid.max_grid[i]) {
      throw DeviceError(expected_got("kernel " + launch.kernel + ", indirect grid",
                                     "(1, 1, 1) to " + text(launch.grid.max_grid), text(grid)));
    }
  }
  return grid;
}

}  // namespace expertile
