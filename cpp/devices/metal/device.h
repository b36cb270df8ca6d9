// device.h: the Metal device: an Apple GPU, its kernels compiled at run time from the embedded sources. metal.h opens
// it.
#pragma once

#include "expertile/device.h"

namespace expertile {

// Present with the GPU's name, or why not.
DeviceStatus metal_status();

}  // namespace expertile
