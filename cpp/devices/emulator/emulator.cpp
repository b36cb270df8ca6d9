// emulator.cpp: shares the threadgroups of a launch out among the workers.
#include "devices/emulator/emulator.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif

#include "devices/emulator/worker.h"
#include "devices/launch_check.h"
#include "expertile/error.h"

namespace expertile::emulator {
namespace {

Order parse_order(const std::string& order) {
  if (order.empty() || order == "ascending") return Order::Ascending;
  if (order == "reversed") return Order::Reversed;
  if (order == "shuffled") return Order::Shuffled;
  throw std::invalid_argument(expected_got("emulator order", "ascending, reversed or shuffled", order));
}

constexpr std::uint64_t kMaxShuffledGroups = std::uint64_t{1} << 20;

// What the workers of one launch share.
struct LaunchState {
  const LoweredKernel* kernel = nullptr;
  const Launch* launch = nullptr;
  std::vector<void*> buffers;
  std::array<std::uint32_t, 3> grid{};
  std::uint64_t count = 0;
  Order order = Order::Ascending;
  std::vector<std::uint32_t> shuffled;
  std::atomic<std::uint64_t> next{0};
  std::atomic<bool> stop{false};
  std::atomic<bool> broken{false};  // a worker stopped in the middle of a threadgroup
  std::mutex mutex;
  std::string error;
  std::uint64_t error_index = std::numeric_limits<std::uint64_t>::max();

  void report(std::uint64_t index, const std::string& text) {
    const std::lock_guard<std::mutex> lock(mutex);
    stop = true;
    if (error.empty() || index < error_index) {
      error = text;
      error_index = index;
    }
  }
};

void work(Worker& worker, LaunchState& state) {
  Threadgroup threadgroup;
  threadgroup.kernel = state.kernel;
  threadgroup.args = state.launch->args.data();
  threadgroup.buffers = state.buffers.data();
  threadgroup.position.threads = state.kernel->info.threads;
  for (int i = 0; i < 3; ++i) threadgroup.position.grid[i] = state.grid[i];
  for (std::uint64_t i = state.next++; i < state.count && !state.stop; i = state.next++) {
    std::uint64_t index = i;
    if (state.order == Order::Reversed) index = state.count - 1 - i;
    if (!state.shuffled.empty()) index = state.shuffled[i];
    threadgroup.index = index;
    threadgroup.position.group[0] = static_cast<std::uint32_t>(index % state.grid[0]);
    threadgroup.position.group[1] = static_cast<std::uint32_t>(index / state.grid[0] % state.grid[1]);
    threadgroup.position.group[2] = static_cast<std::uint32_t>(index / state.grid[0] / state.grid[1]);
    const std::string error = worker.run(threadgroup);
    if (!error.empty()) state.report(index, error);
  }
  const std::string error = worker.end_launch(state.kernel->info.name);
  if (!error.empty()) state.report(state.count, error);
}

// The same where an exception would end the process: a thread's, or the caller's while threads run.
void work_or_report(Worker& worker, LaunchState& state) {
  try {
    work(worker, state);
  } catch (const std::exception& error) {
    state.broken = true;
    state.report(state.count, expected_got("kernel " + state.launch->kernel, "memory for its threads", error.what()));
  }
}

}  // namespace

int usable_cpus() {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0 && CPU_COUNT(&set) > 0) return CPU_COUNT(&set);
#endif
  const unsigned int count = std::thread::hardware_concurrency();
  return count > 0 ? static_cast<int>(count) : 1;
}

Emulator::Emulator(const EmulatorOptions& options) : options_(options) {
  if (options.threads < 0) {
    throw std::invalid_argument(expected_got("emulator threads", "0 or more", options.threads));
  }
  parse_order(options.order);
  if (options_.threads == 0) options_.threads = usable_cpus();
}

Emulator::~Emulator() = default;

std::vector<std::uint32_t> Emulator::launch_order(std::size_t n) const {
  std::vector<std::uint32_t> order;
  fill_order(order, static_cast<std::uint32_t>(n), parse_order(options_.order), options_.seed, 0);
  return order;
}

void Emulator::run(const LoweredKernel& kernel, const Launch& launch) {
  check_run(launch);
  if (kernel.info.threads == 0 || kernel.info.threads > kMaxThreads) {
    throw DeviceError(expected_got("kernel " + launch.kernel, "1 to 1024 threads", kernel.info.threads));
  }
  LaunchState state;
  state.kernel = &kernel;
  state.launch = &launch;
  for (const Binding& binding : launch.buffers) state.buffers.push_back(binding.buffer->host() + binding.offset);
  state.grid = resolve_grid(launch);
  state.count = std::uint64_t{state.grid[0]} * state.grid[1] * state.grid[2];
  state.order = parse_order(options_.order);
  if (state.order == Order::Shuffled && state.count <= kMaxShuffledGroups) {
    fill_order(state.shuffled, static_cast<std::uint32_t>(state.count), state.order, options_.seed, 0);
  }
  const std::uint64_t wanted = std::min<std::uint64_t>(static_cast<std::uint64_t>(options_.threads), state.count);
  while (workers_.size() < wanted) workers_.push_back(std::make_unique<Worker>(state.order, options_.seed));
  std::vector<std::thread> threads;
  try {
    for (std::uint64_t i = 1; i < wanted; ++i) {
      threads.emplace_back([&, i] { work_or_report(*workers_[i], state); });
    }
  } catch (const std::exception&) {
    // The system has no more threads to give: those that there are do the work, with the same result.
  }
  work_or_report(*workers_[0], state);
  for (std::thread& thread : threads) thread.join();
  if (state.broken) workers_.clear();
  if (!state.error.empty()) throw DeviceError(state.error);
}

}  // namespace expertile::emulator
