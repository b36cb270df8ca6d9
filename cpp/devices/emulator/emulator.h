// emulator.h: runs the lowered .metal kernels on the host's cores, with Metal's meaning: threadgroups, barriers,
// simdgroups, and an error where Metal would leave the result open.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "devices/emulator/lowered.h"
#include "expertile/device.h"
#include "expertile/program.h"

namespace expertile::emulator {

struct EmulatorOptions {
  int threads = 0;         // operating-system threads; 0 = as many as this process may use
  std::string order;       // of threads and threadgroups: "ascending", "reversed", "shuffled"; "" = ascending
  std::uint64_t seed = 0;  // of the shuffled order
};

class Worker;

// Keeps its workers' stacks from launch to launch. Not for two threads at once.
class Emulator {
 public:
  explicit Emulator(const EmulatorOptions& options);  // std::invalid_argument: unknown order, threads below 0
  ~Emulator();
  Emulator(const Emulator&) = delete;
  Emulator& operator=(const Emulator&) = delete;

  // Buffers must be host memory, the launch must have passed check_launch. Throws DeviceError naming the kernel.
  void run(const LoweredKernel& kernel, const Launch& launch);

  // 0 .. n-1 as this emulator's order has it: for launches of one group.
  std::vector<std::uint32_t> launch_order(std::size_t n) const;

 private:
  EmulatorOptions options_;
  std::vector<std::unique_ptr<Worker>> workers_;
};

// CPUs that this process may run on, at least 1.
int usable_cpus();

std::shared_ptr<Device> make_emulator_device(const DeviceOptions& options);

}  // namespace expertile::emulator
