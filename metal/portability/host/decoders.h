// decoders.h: the part of the shim that the lowered quant.h needs: types and functions, no threadgroups.
#pragma once

#include "math.h"
#include "types.h"
