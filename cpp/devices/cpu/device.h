// device.h: the cpu device, native kernels on all cores of the host.
#pragma once

#include <memory>

#include "expertile/device.h"

namespace expertile {

DeviceStatus cpu_status();
std::shared_ptr<Device> make_cpu_device(const DeviceOptions& options);

}  // namespace expertile
