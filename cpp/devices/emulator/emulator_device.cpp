// emulator_device.cpp: the emulator behind the five methods of a device.
#include <chrono>
#include <mutex>

#include "devices/emulator/emulator.h"
#include "devices/host_buffer.h"
#include "devices/launch_check.h"
#include "expertile/error.h"

namespace expertile::emulator {
namespace {

class EmulatorDevice : public Device {
 public:
  explicit EmulatorDevice(const DeviceOptions& options)
      : emulator_({options.threads, options.order, options.seed}), guard_(options.guard) {}

  const char* kind() const override { return "emulator"; }
  std::string name() const override { return "Metal emulator"; }

  BufferRef alloc(std::uint64_t bytes, const std::byte* source) override {
    return std::make_shared<HostBuffer>("emulator", bytes, source, guard_);
  }
  void write(const BufferRef& to, std::uint64_t offset, const void* from, std::uint64_t bytes) override {
    host_write("emulator write", to, offset, from, bytes);
  }
  void read(const BufferRef& from, std::uint64_t offset, void* to, std::uint64_t bytes) override {
    host_read("emulator read", from, offset, to, bytes);
  }
  BufferRef adopt(std::uint64_t address, std::uint64_t bytes) override {
    return host_adopt("emulator adopt", address, bytes);
  }

  void prepare(Program& program) override {
    for (Group& group : program.groups) {
      for (Launch& launch : group.launches) {
        const LoweredKernel* kernel = find_lowered(launch.kernel);
        if (kernel == nullptr) {
          throw DeviceError(expected_got("emulator", "a kernel of metal/kernels", launch.kernel));
        }
        check_launch(launch, kernel->info);
        check_exact(launch, "emulator");
        launch.pipeline = kernel;
      }
    }
  }

  double run(const Program& program) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto start = std::chrono::steady_clock::now();
    for (const Group& group : program.groups) {
      // Launches of a group have no order among them: what holds in one must hold in any.
      for (const std::uint32_t i : emulator_.launch_order(group.launches.size())) run_launch(group.launches[i]);
    }
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

 private:
  void run_launch(const Launch& launch) {
    if (launch.pipeline == nullptr) {
      throw DeviceError(expected_got("emulator", "a prepared program", launch.kernel));
    }
    const LoweredKernel& kernel = *static_cast<const LoweredKernel*>(launch.pipeline);
    emulator_.run(kernel, launch);
    if (!guard_) return;
    for (std::size_t i = 0; i < launch.buffers.size(); ++i) {
      const auto* buffer = dynamic_cast<const HostBuffer*>(launch.buffers[i].buffer.get());
      if (buffer != nullptr) buffer->check_guards(kernel.info.buffers[i].name, launch.kernel);
    }
  }

  Emulator emulator_;
  bool guard_;
  std::mutex mutex_;  // one program at a time: the workers are shared
};

}  // namespace

std::shared_ptr<Device> make_emulator_device(const DeviceOptions& options) {
  return std::make_shared<EmulatorDevice>(options);
}

}  // namespace expertile::emulator
