// metal_stdlib.h: everything that a lowered kernel needs on the host.
#pragma once

#include "atomic.h"
#include "half.h"
#include "math.h"
#if EXPERTILE_METAL_TENSOR
#include "metal_tensor.h"
#endif
#include "simd.h"
#include "simdgroup_matrix.h"
#include "types.h"
