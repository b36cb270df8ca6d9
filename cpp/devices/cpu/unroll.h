// unroll.h: loops over registers.
#pragma once

// Left as loops, their arrays would live in memory.
#if defined(__clang__)
#define EXPERTILE_UNROLL _Pragma("clang loop unroll(full)")
#else
#define EXPERTILE_UNROLL _Pragma("GCC unroll 32")
#endif
