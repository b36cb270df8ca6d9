// IOSurfaceRef.h: metal-cpp's textures name this type.
#pragma once
typedef struct __IOSurface* IOSurfaceRef;
