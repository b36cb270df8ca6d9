// worker.h: one operating-system thread's share of the emulator: runs a threadgroup at a time, its lanes as fibers.
//
// There is no scheduler fiber: a lane that must wait picks the next one itself, and a lane that returns starts the next
// one on the same stack, so that a kernel without barriers is a plain loop over its lanes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "devices/emulator/fiber.h"
#include "devices/emulator/lowered.h"
#include "devices/garbage.h"

namespace expertile::emulator {

constexpr std::uint32_t kThreadgroupBytes = 32 * 1024;
constexpr std::uint32_t kMaxThreads = 1024;
constexpr std::uint32_t kMaxArrays = 64;
constexpr std::uint32_t kArenaBytes = kThreadgroupBytes + kMaxArrays * (kGuardBytes + 16);

enum class Order { Ascending, Reversed, Shuffled };

// A permutation of 0 .. n-1 in the given order; the same for the same n, seed and salt.
void fill_order(std::vector<std::uint32_t>& order, std::uint32_t n, Order kind, std::uint64_t seed, std::uint64_t salt);

struct Threadgroup {
  const LoweredKernel* kernel = nullptr;
  const void* args = nullptr;
  void* const* buffers = nullptr;
  Position position;        // of lane 0
  std::uint64_t index = 0;  // in the grid
};

class Worker {
 public:
  Worker(Order order, std::uint64_t seed);
  // Runs every lane; returns what went wrong ("" = nothing). The worker stays usable.
  std::string run(const Threadgroup& threadgroup);
  // To call behind a launch: frees the stacks.
  std::string end_launch(const std::string& kernel);

  // For the lane that runs now (lane.h).
  std::uint32_t lane_in_simdgroup() const { return current_ % kLanes; }
  SimdOperation& simd_operation();
  void simd_meet(SimdFunction compute, const char* name, Site site);
  void barrier(Site site);
  std::uint32_t thread_in_threadgroup() const { return current_; }
  bool elements_in_fours() const { return order_kind_ == Order::Ascending; }
  MatrixCall& matrix_call(const void* memory, Site site, bool& first);
  MatrixCall& tensor_call(std::uint32_t simdgroups, const void* memory, Site site, bool& first);
  [[noreturn]] void fail(const std::string& expected, const std::string& got, Site site);
  [[noreturn]] void fail_returned_lane(std::uint32_t lane);
  void* threadgroup_memory(const void* key, std::size_t bytes, const char* name, Site site);

 private:
  struct Lane {
    Context context;
    std::uint32_t matrix_calls = 0;
    std::uint32_t threadgroup_calls = 0;  // of those, the ones that take the whole threadgroup
    std::uint8_t phase = 0;               // which of the simdgroup's two operations comes next
    bool started = false;
    bool finished = false;
    const char* waits_for = nullptr;
    Site site;
    Site matrix_site;
  };
  struct Simdgroup {
    SimdOperation operations[2];
    std::uint32_t alive = 0;     // bits of lanes that have not returned
    std::uint32_t arrived = 0;   // bits of lanes at the present operation
    std::uint32_t barrier = 0;   // bits of lanes at the present barrier
    std::uint32_t returned = 0;  // how many have
    std::uint32_t finished_matrix_calls = 0;
    SimdFunction compute = nullptr;
    std::vector<std::unique_ptr<MatrixCall>> calls;  // since the lanes last met
    std::uint32_t calls_used = 0;
    std::uint32_t calls_before = 0;    // each lane's calls until then
    std::uint32_t first_position = 0;  // in the order
  };
  struct Array {
    const void* key;
    std::uint32_t offset;
    std::uint32_t bytes;
    const char* name;
    Site site;
  };

  static void fiber_main();
  void lanes_loop();
  void finish_lane();
  void suspend();
  bool pick();  // sets current_ to the next lane that can run; false when none can
  void ready(std::uint32_t lane);
  void complete(Simdgroup& group, std::uint32_t skip_lane);
  void check_meeting(std::uint32_t others);
  void check_threadgroup_calls(std::uint32_t other, const char* where, Site site);
  [[noreturn]] void fail_deadlock();
  void reset_lanes(const Threadgroup& threadgroup);
  std::string reset_memory();

  Order order_kind_;
  std::uint64_t seed_;
  StackPool stacks_;
  Context base_;
  std::unique_ptr<Lane[]> lanes_;
  std::unique_ptr<Simdgroup[]> simdgroups_;
  std::vector<std::uint32_t> order_;            // lane of a position
  std::vector<std::uint32_t> position_of_;      // position of a lane
  std::uint64_t ready_[kMaxThreads / 64] = {};  // by position
  std::uint32_t cursor_ = 0;
  std::uint32_t current_ = 0;
  std::uint32_t threads_ = 0;
  std::uint32_t finished_ = 0;
  std::uint32_t at_barrier_ = 0;
  Site barrier_site_;
  std::uint32_t barrier_lane_ = 0;
  std::uint32_t finished_lane_ = 0;  // the first that returned
  Threadgroup threadgroup_;
  std::string error_;
  std::unique_ptr<unsigned char[]> memory_;
  std::vector<Array> arrays_;
  std::uint32_t memory_used_ = 0;  // bytes of arrays, counted against the limit
  std::uint32_t memory_end_ = 0;   // with guards
};

}  // namespace expertile::emulator
