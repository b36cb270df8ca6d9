// device.h: the CUDA device: an NVIDIA GPU by the driver API and NVRTC, both found at run time.
#pragma once

#include <memory>

#include "expertile/device.h"

namespace expertile {

// The first GPU. options.threads: kernels compiled at once (0 = as many as the machine has). Throws DeviceError where
// there is none, saying why.
std::shared_ptr<Device> make_cuda_device(const DeviceOptions& options);

// Present with the GPU's name, or why not.
DeviceStatus cuda_status();

}  // namespace expertile
