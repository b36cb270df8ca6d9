// serve.h: programs that the bindings do not build: an embedding server's, and one with a hazard.
#pragma once

#include "expertile/device.h"

namespace standin {

// mm_clear on a server's own MTL::Device, queue and buffers, as expertile/metal.h shows. Throws where anything is off.
void serve();

// Two launches of mm_clear on the same buffers, in one group or in two.
void run_clear_twice(expertile::Device& device, bool one_group);

}  // namespace standin
