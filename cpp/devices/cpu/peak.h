// peak.h: what this machine's cores do at most, measured.
#pragma once

namespace expertile {

// fp32 multiply-adds of `threads` threads (0 = as many as this process may use), in operations a second, two each: the
// best of several tries of some 20 ms.
double measure_peak(int threads);

}  // namespace expertile
