#include "devices/cuda/driver.h"

#include <dlfcn.h>

#include "expertile/error.h"

namespace expertile::cuda {
namespace {

constexpr int kLowestVersion = 13000;  // the code of NVRTC 13, which the shim needs

template <class Function>
bool find(void* library, const char* symbol, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, symbol));
  return function != nullptr;
}

Driver load() {
  Driver table;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    table.absent = "no NVIDIA driver: libcuda.so.1 is not found";
    return table;
  }
#define EXPERTILE_CUDA_FIND(name, symbol, ...) \
  if (table.absent.empty() && !find(library, symbol, table.name)) table.absent = "driver too old: no " symbol;
  EXPERTILE_CUDA_DRIVER(EXPERTILE_CUDA_FIND)
#undef EXPERTILE_CUDA_FIND
  find(library, "cuGraphAddDependencies_v2", table.graph_edges);
  if (!table.absent.empty()) return table;
  if (const Result result = table.init(0); result != kSuccess) {
    table.absent = "cuInit failed: " + table.words(result);
    return table;
  }
  int version = 0;
  table.driver_version(&version);
  if (version < kLowestVersion) {
    table.absent = "the driver is for CUDA " + std::to_string(version / 1000) + "." +
                   std::to_string(version % 1000 / 10) + ", 13.0 is needed";
    return table;
  }
  int count = 0;
  table.device_count(&count);
  if (count == 0) table.absent = "the driver sees no device";
  return table;
}

}  // namespace

std::string Driver::words(Result result) const {
  const char* text = nullptr;
  if (error_string && error_string(result, &text) == kSuccess && text) {
    return std::string(text) + " (" + std::to_string(result) + ")";
  }
  return "error " + std::to_string(result);
}

void Driver::check(Result result, const std::string& where) const {
  if (result != kSuccess) throw DeviceError(expected_got(where, "success", words(result)));
}

const Driver& driver() {
  static const Driver table = load();
  return table;
}

}  // namespace expertile::cuda
