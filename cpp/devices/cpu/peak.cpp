#include "devices/cpu/peak.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <vector>

#include "devices/cpu/kernels.h"
#include "devices/cpu/thread_pool.h"

namespace expertile {
namespace {

constexpr std::size_t kSinkFloats = 256;  // 16 chains of 16 lanes
constexpr double kPieceSeconds = 2e-3;

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

double measure_peak(int threads) {
  const cpu::Kernels& kernels = *cpu::find_kernels("");
  ThreadPool pool(threads);
  const std::size_t pieces = static_cast<std::size_t>(pool.threads()) * 8;
  std::vector<float> sinks(static_cast<std::size_t>(pool.threads()) * kSinkFloats, 1.0f);
  std::size_t rounds = 1000;
  for (;;) {  // a piece long enough for the clock, short enough to share out evenly
    const auto start = std::chrono::steady_clock::now();
    kernels.multiply_adds(rounds, sinks.data());
    if (seconds_since(start) >= kPieceSeconds) break;
    rounds *= 2;
  }
  double best = 0;
  for (int attempt = 0; attempt < 8; ++attempt) {
    std::vector<double> operations(pieces);
    const auto start = std::chrono::steady_clock::now();
    pool.run(pieces, [&](std::size_t piece, int worker) {
      operations[piece] = kernels.multiply_adds(rounds, sinks.data() + static_cast<std::size_t>(worker) * kSinkFloats);
    });
    const double seconds = seconds_since(start);
    double sum = 0;
    for (const double count : operations) sum += count;
    best = std::max(best, sum / seconds);
  }
  return best;
}

}  // namespace expertile
