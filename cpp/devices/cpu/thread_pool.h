// thread_pool.h: the persistent threads of a host device.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace expertile {

// `threads` workers, the calling thread among them; 0 = as many as this process may use.
//
// A task is called with (index, worker): worker is 0..threads-1, and no two tasks run at once under the same worker.
// Tasks are handed out one by one, in ascending order, so that neighbours in memory stay neighbours in time; what a
// task writes must depend on its index alone, then the result is the same for any number of threads. A call from
// inside a task runs its tasks one after another, under the worker it came from. The first exception of a task
// reaches the caller once all workers have stopped; the tasks that have not begun by then are dropped. A process that
// forked from one with a pool has none of its threads: its next call starts new ones.
class ThreadPool {
 public:
  explicit ThreadPool(int threads = 0);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(scratch_.size()); }

  template <class Body>
  void run(std::size_t n_tasks, Body&& body) {
    using Plain = std::remove_reference_t<Body>;
    run_erased(
        n_tasks, [](void* context, std::size_t task, int worker) { (*static_cast<Plain*>(context))(task, worker); },
        const_cast<void*>(static_cast<const void*>(&body)));
  }

  // The range 0..n in pieces of at least `grain`: body(begin, end, worker).
  template <class Body>
  void run_ranges(std::size_t n, std::size_t grain, Body&& body) {
    if (n == 0) return;
    const std::size_t most = static_cast<std::size_t>(threads()) * 4;
    std::size_t pieces = (n + grain - 1) / grain;
    pieces = pieces < most ? pieces : most;
    run(pieces, [&](std::size_t piece, int worker) { body(n * piece / pieces, n * (piece + 1) / pieces, worker); });
  }

  // Memory of one worker, aligned to 64 bytes, kept from call to call; valid until the worker asks for more.
  std::byte* scratch(int worker, std::size_t bytes);
  // Memory of the thread that launches, shared by all tasks of its call.
  std::byte* shared_scratch(std::size_t bytes);

 private:
  using Call = void (*)(void* context, std::size_t task, int worker);
  struct Scratch {
    std::unique_ptr<std::byte[]> memory;
    std::size_t bytes = 0;
    std::byte* grow(std::size_t wanted);
  };

  void run_erased(std::size_t n_tasks, Call call, void* context);
  void start_workers();
  bool drop_lost_workers();  // whether there had been a fork
  void work(int worker);
  void worker_main(int worker);
  void wake_workers();

  std::vector<Scratch> scratch_;
  Scratch shared_;
  std::vector<std::thread> workers_;
  std::mutex callers_;  // one outer call at a time
  int forks_ = 0;       // of this process and those before it, when the workers were started

  Call call_ = nullptr;
  void* context_ = nullptr;
  std::size_t n_tasks_ = 0;
  std::atomic<std::size_t> next_{0};
  std::atomic<int> busy_{0};
  std::atomic<std::uint32_t> generation_{0};
  std::atomic<bool> stopping_{false};
  std::mutex error_mutex_;
  std::exception_ptr error_;
};

// What this process may use: the affinity mask where the system has one, else the hardware's threads.
int available_threads();

}  // namespace expertile
