// CGGeometry.h: metal-cpp's QuartzCore names this type, and no test needs more of it.
#pragma once
struct CGSize;
