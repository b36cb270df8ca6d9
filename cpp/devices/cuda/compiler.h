// compiler.h: NVRTC, NVIDIA's run-time compiler, found at run time as a library.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace expertile::cuda {

struct Header {
  const char* name;
  const char* text;
};

// Why NVRTC cannot be used, with the places that were searched; "" = it can.
const std::string& compiler_absent();
// "13.0"; part of the key of cached code.
std::string compiler_version();

// The options for a device of this compute capability: its own machine code, or PTX where NVRTC does not know it yet.
std::vector<std::string> compiler_options(int major, int minor);

// Machine code of one program. Throws DeviceError with `name` and the compiler's log.
std::string compile(const std::string& name, const std::string& source, const std::vector<Header>& headers,
                    const std::vector<std::string>& options);

}  // namespace expertile::cuda
