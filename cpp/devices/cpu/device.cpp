#include "devices/cpu/device.h"

#include <chrono>
#include <map>
#include <mutex>

#include "devices/cpu/kernels.h"
#include "devices/cpu/native.h"
#include "devices/cpu/thread_pool.h"
#include "devices/emulator/emulator.h"
#include "devices/host_buffer.h"
#include "devices/launch_check.h"
#include "expertile/error.h"
#include "expertile/program.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace expertile {
namespace {

std::string processor_name() {
#if defined(__x86_64__)
  unsigned int words[12] = {};
  for (unsigned int i = 0; i < 3; ++i) {
    unsigned int* at = words + 4 * i;
    if (__get_cpuid(0x80000002u + i, at, at + 1, at + 2, at + 3) == 0) return "x86-64";
  }
  const std::string text(reinterpret_cast<const char*>(words), sizeof(words));
  const std::string name = text.substr(0, text.find('\0'));
  const std::size_t last = name.find_last_not_of(' ');
  return last == std::string::npos ? "x86-64" : name.substr(0, last + 1);
#elif defined(__APPLE__)
  char text[256] = {};
  std::size_t size = sizeof(text) - 1;
  return sysctlbyname("machdep.cpu.brand_string", text, &size, nullptr, 0) == 0 ? text : "Apple CPU";
#else
  return "CPU";
#endif
}

std::string device_name(const cpu::Kernels& kernels) { return processor_name() + " (" + kernels.name + ")"; }

const cpu::Kernels& chosen_kernels(const std::string& instructions) {
  if (const cpu::Kernels* kernels = cpu::find_kernels(instructions)) return *kernels;
  std::string list;
  for (const std::string& name : cpu::kernel_names()) list += (list.empty() ? "" : ", ") + name;
  throw std::invalid_argument(
      expected_got("open_device: instructions", "what this machine has: " + list, instructions));
}

// What Launch::pipeline points to.
struct Prepared {
  const KernelInfo* info = nullptr;
  NativeKernel native = nullptr;
  const emulator::LoweredKernel* lowered = nullptr;
};

class CpuDevice : public Device {
 public:
  explicit CpuDevice(const DeviceOptions& options)
      : kernels_(chosen_kernels(options.instructions)),
        pool_(options.threads),
        emulator_({pool_.threads(), options.order, options.seed}),
        guard_(options.guard) {}

  const char* kind() const override { return "cpu"; }
  std::string name() const override { return device_name(kernels_); }

  BufferRef alloc(std::uint64_t bytes, const std::byte* source) override {
    return std::make_shared<HostBuffer>("cpu", bytes, source, guard_);
  }
  void write(const BufferRef& to, std::uint64_t offset, const void* from, std::uint64_t bytes) override {
    host_write("cpu write", to, offset, from, bytes);
  }
  void read(const BufferRef& from, std::uint64_t offset, void* to, std::uint64_t bytes) override {
    host_read("cpu read", from, offset, to, bytes);
  }
  BufferRef adopt(std::uint64_t address, std::uint64_t bytes) override {
    return host_adopt("cpu adopt", address, bytes);
  }

  void prepare(Program& program) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (Group& group : program.groups) {
      for (Launch& launch : group.launches) {
        const Prepared& prepared = resolve(launch.kernel);
        check_launch(launch, *prepared.info);
        launch.pipeline = &prepared;
      }
    }
  }

  double run(const Program& program) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto start = std::chrono::steady_clock::now();
    for (const Group& group : program.groups) {
      for (const Launch& launch : group.launches) run_launch(launch);
    }
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

 private:
  const Prepared& resolve(const std::string& name) {
    const auto found = prepared_.find(name);
    if (found != prepared_.end()) return found->second;
    Prepared prepared;
    prepared.info = find_kernel(name);
    if (prepared.info == nullptr) throw DeviceError(expected_got("cpu", "a kernel of metal/kernels", name));
    prepared.native = find_native(name);
    if (prepared.native == nullptr) prepared.lowered = emulator::find_lowered(name);
    return prepared_.emplace(name, prepared).first->second;
  }

  void run_launch(const Launch& launch) {
    if (launch.pipeline == nullptr) throw DeviceError(expected_got("cpu", "a prepared program", launch.kernel));
    const Prepared& prepared = *static_cast<const Prepared*>(launch.pipeline);
    if (prepared.native != nullptr) {
      check_run(launch);
      NativeCall call{launch.args.data(), {}, resolve_grid(launch), pool_, kernels_, launch.precision};
      for (const Binding& binding : launch.buffers) call.buffers.push_back(binding.buffer->host() + binding.offset);
      prepared.native(call);
    } else {
      emulator_.run(*prepared.lowered, launch);
    }
    if (guard_) check_guards(launch, *prepared.info);
  }

  static void check_guards(const Launch& launch, const KernelInfo& info) {
    for (std::size_t i = 0; i < launch.buffers.size(); ++i) {
      const auto* buffer = dynamic_cast<const HostBuffer*>(launch.buffers[i].buffer.get());
      if (buffer != nullptr) buffer->check_guards(info.buffers[i].name, launch.kernel);
    }
  }

  const cpu::Kernels& kernels_;
  ThreadPool pool_;
  emulator::Emulator emulator_;  // for kernels without a native form
  bool guard_;
  std::mutex mutex_;  // one program at a time
  std::map<std::string, Prepared> prepared_;
};

}  // namespace

NativeKernel find_native(const std::string& name) {
  for (const auto find : {find_native_plan, find_native_gemm, find_native_elementwise}) {
    if (const NativeKernel kernel = find(name)) return kernel;
  }
  return nullptr;
}

DeviceStatus cpu_status() { return {"cpu", true, device_name(*cpu::find_kernels(""))}; }

std::shared_ptr<Device> make_cpu_device(const DeviceOptions& options) { return std::make_shared<CpuDevice>(options); }

}  // namespace expertile
