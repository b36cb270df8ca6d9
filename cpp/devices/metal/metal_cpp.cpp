// metal_cpp.cpp: the one unit that holds metal-cpp's selectors and classes.
#define NS_PRIVATE_IMPLEMENTATION
#define MTL_PRIVATE_IMPLEMENTATION
#include <Metal/Metal.hpp>
