// metal_cuda.h: what a lowered .metal file includes under NVRTC in place of metal_stdlib.
#pragma once

#include "types.h"

#include "math.h"
#include "threads.h"
