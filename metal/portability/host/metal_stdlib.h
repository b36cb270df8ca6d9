// metal_stdlib.h: everything that a lowered kernel needs on the host.
#pragma once

#include "atomic.h"
#include "half.h"
#include "math.h"
#include "simd.h"
#include "simdgroup_matrix.h"
#include "types.h"
