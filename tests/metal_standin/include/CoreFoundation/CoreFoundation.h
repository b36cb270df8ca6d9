// CoreFoundation.h: the one type that metal-cpp names, and <math.h> as the real header brings it.
#pragma once
#include <math.h>

typedef double CFTimeInterval;
