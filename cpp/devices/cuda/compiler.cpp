#include "devices/cuda/compiler.h"

#include <dlfcn.h>

#include <algorithm>
#include <filesystem>

#include "expertile/error.h"

namespace expertile::cuda {
namespace {

namespace fs = std::filesystem;
using Program = void*;
using Result = int;

// name of the member, symbol, parameters
// clang-format off
#define EXPERTILE_NVRTC(call)                                                                                         \
  call(version, "nvrtcVersion", int*, int*)                                                                           \
  call(n_architectures, "nvrtcGetNumSupportedArchs", int*)                                                            \
  call(architectures, "nvrtcGetSupportedArchs", int*)                                                                 \
  call(create, "nvrtcCreateProgram", Program*, const char*, const char*, int, const char* const*, const char* const*) \
  call(destroy, "nvrtcDestroyProgram", Program*)                                                                      \
  call(build, "nvrtcCompileProgram", Program, int, const char* const*)                                                \
  call(log_size, "nvrtcGetProgramLogSize", Program, std::size_t*)                                                     \
  call(log, "nvrtcGetProgramLog", Program, char*)                                                                     \
  call(cubin_size, "nvrtcGetCUBINSize", Program, std::size_t*)                                                        \
  call(cubin, "nvrtcGetCUBIN", Program, char*)                                                                        \
  call(ptx_size, "nvrtcGetPTXSize", Program, std::size_t*)                                                            \
  call(ptx, "nvrtcGetPTX", Program, char*)
// clang-format on

struct Compiler {
#define EXPERTILE_NVRTC_MEMBER(name, symbol, ...) Result (*name)(__VA_ARGS__) = nullptr;
  EXPERTILE_NVRTC(EXPERTILE_NVRTC_MEMBER)
#undef EXPERTILE_NVRTC_MEMBER
  std::string absent;
  std::string path;
  int major = 0, minor = 0;
};

// Where pip's wheel and the toolkit put NVRTC: beside this module's package, or under /usr/local/cuda. A library that
// the process has loaded already is found by its bare name.
std::vector<std::string> candidates() {
  std::vector<std::string> paths = {"libnvrtc.so.13"};
  Dl_info self{};
  if (dladdr(reinterpret_cast<const void*>(&candidates), &self) != 0 && self.dli_fname) {
    std::error_code ignored;
    const fs::path module = fs::absolute(self.dli_fname, ignored);
    paths.push_back((module.parent_path().parent_path() / "nvidia/cu13/lib/libnvrtc.so.13").string());
  }
  paths.push_back("/usr/local/cuda/lib64/libnvrtc.so.13");
  return paths;
}

// NVRTC opens its builtins by their bare name, which finds them beside it only once they are loaded.
void load_builtins(const void* symbol) {
  Dl_info library{};
  if (dladdr(symbol, &library) == 0 || !library.dli_fname) return;
  std::error_code ignored;
  for (const auto& file : fs::directory_iterator(fs::path(library.dli_fname).parent_path(), ignored)) {
    if (file.path().filename().string().starts_with("libnvrtc-builtins.so")) {
      dlopen(file.path().c_str(), RTLD_NOW | RTLD_LOCAL);
    }
  }
}

Compiler load() {
  Compiler table;
  void* library = nullptr;
  std::string searched;
  for (const std::string& path : candidates()) {
    library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library) {
      table.path = path;
      break;
    }
    searched += (searched.empty() ? "" : ", ") + path;
  }
  if (!library) {
    table.absent = "NVRTC 13 is not found (pip install nvidia-cuda-nvrtc); searched " + searched;
    return table;
  }
#define EXPERTILE_NVRTC_FIND(name, symbol, ...)                                \
  table.name = reinterpret_cast<decltype(table.name)>(dlsym(library, symbol)); \
  if (table.absent.empty() && !table.name) table.absent = table.path + " has no " symbol;
  EXPERTILE_NVRTC(EXPERTILE_NVRTC_FIND)
#undef EXPERTILE_NVRTC_FIND
  if (!table.absent.empty()) return table;
  load_builtins(reinterpret_cast<const void*>(table.version));
  table.version(&table.major, &table.minor);
  return table;
}

const Compiler& compiler() {
  static const Compiler table = load();
  return table;
}

bool makes_machine_code(const std::vector<std::string>& options) {
  return std::any_of(options.begin(), options.end(),
                     [](const std::string& option) { return option.starts_with("--gpu-architecture=sm_"); });
}

}  // namespace

const std::string& compiler_absent() { return compiler().absent; }

std::string compiler_version() { return std::to_string(compiler().major) + "." + std::to_string(compiler().minor); }

std::vector<std::string> compiler_options(int major, int minor) {
  const Compiler& nvrtc = compiler();
  int count = 0;
  nvrtc.n_architectures(&count);
  std::vector<int> known(static_cast<std::size_t>(std::max(count, 1)), 0);
  nvrtc.architectures(known.data());
  const int wanted = major * 10 + minor;
  std::string architecture = "sm_" + std::to_string(wanted);
  if (std::find(known.begin(), known.end(), wanted) == known.end()) {
    int best = 0;
    for (const int each : known) best = each <= wanted ? std::max(best, each) : best;
    if (best == 0) {
      throw DeviceError(expected_got("NVRTC " + compiler_version(),
                                     "support of compute capability " + std::to_string(wanted), "none that is as low"));
    }
    architecture = "compute_" + std::to_string(best);
  }
  // Products and sums stay apart, divisions and roots are rounded exactly, subnormals are kept: bits are promised.
  return {"--gpu-architecture=" + architecture,
          "--std=c++20",
          "--device-as-default-execution-space",
          "--fmad=false",
          "--prec-div=true",
          "--prec-sqrt=true",
          "--ftz=false"};
}

std::string compile(const std::string& name, const std::string& source, const std::vector<Header>& headers,
                    const std::vector<std::string>& options) {
  const Compiler& nvrtc = compiler();
  std::vector<const char*> names, texts, arguments;
  for (const Header& header : headers) {
    names.push_back(header.name);
    texts.push_back(header.text);
  }
  for (const std::string& option : options) arguments.push_back(option.c_str());
  struct Owned {
    const Compiler& nvrtc;
    Program program = nullptr;
    ~Owned() { nvrtc.destroy(&program); }
  } owned{nvrtc};
  Result result = nvrtc.create(&owned.program, source.c_str(), (name + ".cu").c_str(), static_cast<int>(names.size()),
                               texts.data(), names.data());
  if (result == 0) result = nvrtc.build(owned.program, static_cast<int>(arguments.size()), arguments.data());
  if (result != 0) {
    std::size_t size = 0;
    std::string log;
    if (owned.program && nvrtc.log_size(owned.program, &size) == 0 && size > 1) {
      log.resize(size);
      nvrtc.log(owned.program, log.data());
      log.resize(size - 1);
    }
    throw DeviceError(
        expected_got("kernel " + name, "code that NVRTC compiles", "error " + std::to_string(result) + "\n" + log));
  }
  const bool machine_code = makes_machine_code(options);
  std::size_t size = 0;
  result = machine_code ? nvrtc.cubin_size(owned.program, &size) : nvrtc.ptx_size(owned.program, &size);
  std::string code(size, '\0');
  if (result == 0) {
    result = machine_code ? nvrtc.cubin(owned.program, code.data()) : nvrtc.ptx(owned.program, code.data());
  }
  if (result != 0)
    throw DeviceError(expected_got("kernel " + name, "NVRTC's output", "error " + std::to_string(result)));
  return code;
}

}  // namespace expertile::cuda
