#include "devices/cpu/thread_pool.h"

#include <pthread.h>

#include <new>
#include <string>
#include <utility>

#include "expertile/error.h"

#ifdef __linux__
#include <sched.h>
#endif

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace expertile {
namespace {

// The task that this thread is in: its pool (nullptr = none) and worker.
struct Place {
  const ThreadPool* pool = nullptr;
  int worker = 0;
};
thread_local Place place;

// A wait this long costs less than a sleep and a wake; beyond it a core is better given away.
constexpr int kSpins = 4000;

// How often this process and those that it comes from have forked.
std::atomic<int> forks{0};

void watch_forks() {
  static const int watching = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
  static_cast<void>(watching);
}

inline void pause_briefly() {
#if defined(__x86_64__) || defined(_M_X64)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

int available_threads() {
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    const int count = CPU_COUNT(&set);
    if (count > 0) return count;
  }
#endif
  const unsigned count = std::thread::hardware_concurrency();
  return count == 0 ? 1 : static_cast<int>(count);
}

std::byte* ThreadPool::Scratch::grow(std::size_t wanted) {
  if (wanted > bytes) {
    memory.reset();
    bytes = 0;
    try {
      memory.reset(new std::byte[wanted + 64]);
    } catch (const std::bad_alloc&) {
      throw DeviceError(expected_got("cpu scratch", std::to_string(wanted) + " bytes of memory", "less"));
    }
    bytes = wanted;
  }
  const auto address = reinterpret_cast<std::uintptr_t>(memory.get());
  return memory.get() + ((64 - address % 64) % 64);
}

ThreadPool::ThreadPool(int threads) : scratch_(static_cast<std::size_t>(threads > 0 ? threads : available_threads())) {
  watch_forks();
  start_workers();
}

// All of them or none: where some do not start, the next call tries again.
void ThreadPool::start_workers() {
  generation_.store(0, std::memory_order_relaxed);
  stopping_ = false;
  try {
    for (int worker = 1; worker < threads(); ++worker) {
      workers_.emplace_back([this, worker] { worker_main(worker); });
    }
  } catch (const std::exception& error) {
    const std::size_t started = workers_.size() + 1;
    stopping_ = true;
    wake_workers();
    for (std::thread& thread : workers_) thread.join();
    workers_.clear();
    throw DeviceError(
        expected_got("threads", std::to_string(threads()) + " of them", std::to_string(started) + ": " + error.what()));
  }
  forks_ = forks.load(std::memory_order_relaxed);
}

// After a fork the threads are the parent's. They cannot be joined here, so their handles are left behind.
bool ThreadPool::drop_lost_workers() {
  if (forks_ == forks.load(std::memory_order_relaxed)) return false;
  new std::vector<std::thread>(std::move(workers_));
  workers_.clear();
  return true;
}

ThreadPool::~ThreadPool() {
  drop_lost_workers();
  stopping_ = true;
  wake_workers();
  for (std::thread& thread : workers_) thread.join();
}

void ThreadPool::wake_workers() {
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
}

std::byte* ThreadPool::scratch(int worker, std::size_t bytes) {
  return scratch_[static_cast<std::size_t>(worker)].grow(bytes);
}

std::byte* ThreadPool::shared_scratch(std::size_t bytes) { return shared_.grow(bytes); }

void ThreadPool::work(int worker) {
  const Place outer = std::exchange(place, {this, worker});
  for (;;) {
    const std::size_t task = next_.fetch_add(1, std::memory_order_relaxed);
    if (task >= n_tasks_) break;
    try {
      call_(context_, task, worker);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(error_mutex_);
      if (!error_) error_ = std::current_exception();
      next_.store(n_tasks_, std::memory_order_relaxed);
    }
  }
  place = outer;
}

void ThreadPool::worker_main(int worker) {
  std::uint32_t seen = 0;
  for (;;) {
    for (int spin = 0; spin < kSpins && generation_.load(std::memory_order_acquire) == seen; ++spin) pause_briefly();
    while (generation_.load(std::memory_order_acquire) == seen) generation_.wait(seen, std::memory_order_acquire);
    ++seen;
    if (stopping_) return;
    work(worker);
    if (busy_.fetch_sub(1, std::memory_order_acq_rel) == 1) busy_.notify_one();
  }
}

void ThreadPool::run_erased(std::size_t n_tasks, Call call, void* context) {
  if (n_tasks == 0) return;
  if (place.pool == this) {
    for (std::size_t task = 0; task < n_tasks; ++task) call(context, task, place.worker);
    return;
  }
  const std::lock_guard<std::mutex> lock(callers_);
  if (drop_lost_workers()) start_workers();
  call_ = call;
  context_ = context;
  n_tasks_ = n_tasks;
  next_.store(0, std::memory_order_relaxed);
  error_ = nullptr;
  const bool alone = n_tasks == 1 || workers_.empty();
  if (!alone) {
    busy_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
    wake_workers();
  }
  work(0);
  if (!alone) {
    for (int spin = 0; spin < kSpins && busy_.load(std::memory_order_acquire) != 0; ++spin) pause_briefly();
    for (int left = busy_.load(std::memory_order_acquire); left != 0; left = busy_.load(std::memory_order_acquire)) {
      busy_.wait(left, std::memory_order_acquire);
    }
  }
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

}  // namespace expertile
