// hyper.h: the native kernels of the hyper-connection's read.
#pragma once

#include "devices/cpu/native.h"

namespace expertile::cpu {

void gr_norm_h(const NativeCall& call);
void gr_inject(const NativeCall& call);

}  // namespace expertile::cpu
