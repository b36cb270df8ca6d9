// devices.cpp: the kinds of device, best first.
#include "expertile/device.h"

#include "devices/cpu/device.h"
#include "devices/cuda/device.h"
#include "devices/emulator/emulator.h"
#include "devices/host_buffer.h"
#include "devices/metal/device.h"
#include "expertile/error.h"
#include "expertile/metal.h"

namespace expertile {

std::vector<DeviceStatus> list_devices() {
  return {metal_status(),
          cuda_status(),
          cpu_status(),
          {"emulator", true, "the Metal kernels, compiled by the host's C++ compiler"}};
}

std::shared_ptr<Device> open_device(const std::string& kind, const DeviceOptions& options) {
  if (options.threads < 0)
    throw std::invalid_argument(expected_got("open_device: threads", "0 or more", options.threads));
  if (options.stream && kind != "cuda") {
    throw std::invalid_argument(expected_got("open_device: " + kind, "no stream", *options.stream));
  }
  if (kind == "metal") return open_metal_device({});
  if (kind == "cuda") return make_cuda_device(options);
  if (kind == "cpu") return make_cpu_device(options);
  if (kind == "emulator") return emulator::make_emulator_device(options);
  throw std::invalid_argument(expected_got("open_device", "a kind of device: metal, cuda, cpu, emulator", kind));
}

}  // namespace expertile
