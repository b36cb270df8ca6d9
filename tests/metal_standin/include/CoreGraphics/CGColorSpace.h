// CGColorSpace.h: metal-cpp's QuartzCore names this type.
#pragma once
typedef struct CGColorSpace* CGColorSpaceRef;
