// launch_check.h: is a launch what its kernel declares? For every device.
#pragma once

#include <array>
#include <cstdint>

#include "expertile/program.h"

namespace expertile {

// Throws std::invalid_argument where the number of buffers, an access, a byte range, the args' size or the indirect
// grid's place is not as it must be.
void check_launch(const Launch& launch, const KernelInfo& kernel);

// Refuses another precision than exact, for devices that have no other. Throws std::invalid_argument.
void check_exact(const Launch& launch, const char* kind);

// Throws DeviceError for a zero-sized grid and for a buffer range of no bytes: what Metal refuses when it runs.
void check_run(const Launch& launch);

// The launch's grid, an indirect one read from host memory and held against max_grid. Throws DeviceError.
std::array<std::uint32_t, 3> resolve_grid(const Launch& launch);

}  // namespace expertile
