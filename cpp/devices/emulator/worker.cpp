// worker.cpp: lanes and meetings of lanes.
#include "devices/emulator/worker.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>

#include "devices/garbage.h"
#include "expertile/error.h"

namespace expertile::emulator {
namespace {

thread_local Worker* this_worker = nullptr;

std::uint64_t next_random(std::uint64_t& state) {  // splitmix64
  state += 0x9e3779b97f4a7c15u;
  std::uint64_t z = state;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

bool same_place(Site a, Site b) { return a.line == b.line && (a.file == b.file || std::strcmp(a.file, b.file) == 0); }

// Unwinds the lane that failed; the message is in Worker::error_.
struct LaneFailure {};

}  // namespace

void fill_order(std::vector<std::uint32_t>& order, std::uint32_t n, Order kind, std::uint64_t seed,
                std::uint64_t salt) {
  order.resize(n);
  std::iota(order.begin(), order.end(), 0u);
  if (kind == Order::Reversed) std::reverse(order.begin(), order.end());
  if (kind != Order::Shuffled) return;
  std::uint64_t state = seed * 0x2545f4914f6cdd1du + salt;
  for (std::uint32_t i = n; i > 1; --i) std::swap(order[i - 1], order[next_random(state) % i]);
}

Worker::Worker(Order order, std::uint64_t seed)
    : order_kind_(order),
      seed_(seed),
      lanes_(new Lane[kMaxThreads]),
      simdgroups_(new Simdgroup[kMaxThreads / kLanes]),
      position_of_(kMaxThreads),
      memory_(new unsigned char[kArenaBytes + 16]) {
  arrays_.reserve(kMaxArrays);
  fill_garbage(memory_.get(), kArenaBytes + 16);
}

std::string Worker::run(const Threadgroup& threadgroup) {
  this_worker = this;
  reset_lanes(threadgroup);
  error_.clear();
  base_ = Context();
  pick();
  lanes_[current_].started = true;
  Context first;
  make_context(first, stacks_.acquire(), current_, &Worker::fiber_main);
  lanes_[current_].context = first;
  switch_context(&base_, lanes_[current_].context);
  const std::string memory_error = reset_memory();
  if (!error_.empty()) stacks_.reset();  // the fibers that still wait are abandoned: kernels own nothing
  return error_.empty() ? memory_error : error_;
}

std::string Worker::end_launch(const std::string& kernel) {
  if (stacks_.reset()) return "";
  return expected_got("kernel " + kernel, "thread-private arrays within the stack", "an overflow");
}

void Worker::reset_lanes(const Threadgroup& threadgroup) {
  threadgroup_ = threadgroup;
  threads_ = threadgroup.kernel->info.threads;
  if (order_kind_ == Order::Shuffled || order_.size() != threads_) {
    fill_order(order_, threads_, order_kind_, seed_, threadgroup.index + 1);
    for (std::uint32_t i = 0; i < threads_; ++i) position_of_[order_[i]] = i;
  }
  for (std::uint32_t i = 0; i < threads_; ++i) {
    Lane& lane = lanes_[i];
    lane.matrix_calls = lane.threadgroup_calls = 0;
    lane.phase = 0;
    lane.started = lane.finished = false;
    lane.waits_for = nullptr;
  }
  for (std::uint32_t g = 0; g * kLanes < threads_; ++g) {
    Simdgroup& group = simdgroups_[g];
    const std::uint32_t count = std::min(kLanes, threads_ - g * kLanes);
    group.alive = count == kLanes ? ~0u : (1u << count) - 1u;
    group.arrived = group.barrier = group.returned = group.calls_used = group.calls_before = 0;
    group.first_position = threads_;
    for (std::uint32_t i = 0; i < count; ++i) {
      group.first_position = std::min(group.first_position, position_of_[g * kLanes + i]);
    }
  }
  std::memset(ready_, 0, sizeof(ready_));
  for (std::uint32_t i = 0; i < threads_; ++i) ready_[i / 64] |= std::uint64_t{1} << (i % 64);
  cursor_ = finished_ = at_barrier_ = 0;
}

void Worker::fiber_main() {
  arrived_in_context(&this_worker->base_);
  try {
    this_worker->lanes_loop();
  } catch (const LaneFailure&) {
  }
  switch_context(nullptr, this_worker->base_);
}

void Worker::lanes_loop() {
  for (;;) {
    const Stack stack = lanes_[current_].context.stack;
    Position position = threadgroup_.position;
    position.thread = current_;
    threadgroup_.kernel->entry(threadgroup_.args, threadgroup_.buffers, position);
    finish_lane();
    if (!pick()) {
      if (finished_ != threads_) fail_deadlock();
      stacks_.release(stack);
      switch_context(nullptr, base_);
    }
    Lane& next = lanes_[current_];
    if (next.started) {
      stacks_.release(stack);  // nobody takes it before this fiber has left it
      switch_context(nullptr, next.context);
    }
    next.started = true;
    next.context.stack = stack;
  }
}

void Worker::finish_lane() {
  Lane& lane = lanes_[current_];
  Simdgroup& group = simdgroups_[current_ / kLanes];
  const bool first_to_return = group.returned == 0;
  lane.finished = true;
  if (finished_++ == 0) finished_lane_ = current_;
  group.alive &= ~(1u << (current_ % kLanes));
  ++group.returned;
  if (at_barrier_ != 0) {
    fail("every thread at this barrier", "thread " + std::to_string(current_) + " returned", barrier_site_);
  }
  if (!first_to_return && group.finished_matrix_calls != lane.matrix_calls) {
    fail(std::to_string(group.finished_matrix_calls) + " matrix calls as by the lanes that returned before",
         std::to_string(lane.matrix_calls) + " by thread " + std::to_string(current_), lane.matrix_site);
  }
  check_threadgroup_calls(finished_lane_, "the return", lane.matrix_site);
  group.finished_matrix_calls = lane.matrix_calls;
  if (group.arrived != 0 && group.arrived == group.alive) complete(group, kMaxThreads);
}

void Worker::ready(std::uint32_t lane) {
  const std::uint32_t position = position_of_[lane];
  ready_[position / 64] |= std::uint64_t{1} << (position % 64);
}

bool Worker::pick() {
  const std::uint32_t words = (threads_ + 63) / 64;
  const std::uint32_t start = cursor_ / 64;
  for (std::uint32_t i = 0; i <= words; ++i) {
    const std::uint32_t word = (start + i) % words;
    std::uint64_t bits = ready_[word];
    if (i == 0) bits &= ~std::uint64_t{0} << (cursor_ % 64);
    if (bits == 0) continue;
    const std::uint32_t position = word * 64 + static_cast<std::uint32_t>(std::countr_zero(bits));
    ready_[word] &= ~(std::uint64_t{1} << (position % 64));
    cursor_ = position;
    current_ = order_[position];
    return true;
  }
  return false;
}

// The present lane waits: runs others until somebody made it ready.
void Worker::suspend() {
  const std::uint32_t self = current_;
  if (!pick()) fail_deadlock();
  if (current_ == self) return;
  Lane& next = lanes_[current_];
  if (!next.started) {
    next.started = true;
    try {
      make_context(next.context, stacks_.acquire(), current_, &Worker::fiber_main);
    } catch (const DeviceError& error) {
      error_ = error.what();
      throw LaneFailure();
    }
  }
  switch_context(&lanes_[self].context, next.context);
}

SimdOperation& Worker::simd_operation() { return simdgroups_[current_ / kLanes].operations[lanes_[current_].phase]; }

// `others`: bits of the lanes of its simdgroup that wait where the present lane arrives.
void Worker::check_meeting(std::uint32_t others) {
  if (others == 0) return;
  const Lane& lane = lanes_[current_];
  const std::uint32_t index = current_ / kLanes * kLanes + static_cast<std::uint32_t>(std::countr_zero(others));
  const Lane& other = lanes_[index];
  if (!same_place(other.site, lane.site) || std::strcmp(other.waits_for, lane.waits_for) != 0) {
    fail(std::string("all lanes at the ") + other.waits_for + " of " + place(other.site) + " as thread " +
             std::to_string(index),
         "thread " + std::to_string(current_) + " at the " + lane.waits_for + " of " + place(lane.site), lane.site);
  }
  if (other.matrix_calls != lane.matrix_calls) {
    fail(std::to_string(other.matrix_calls) + " matrix calls before this " + lane.waits_for + " as thread " +
             std::to_string(index),
         std::to_string(lane.matrix_calls) + " by thread " + std::to_string(current_), lane.site);
  }
}

// Has the present lane made as many calls of the whole threadgroup as the other one?
void Worker::check_threadgroup_calls(std::uint32_t other, const char* where, Site site) {
  if (lanes_[other].threadgroup_calls == lanes_[current_].threadgroup_calls) return;
  fail(std::to_string(lanes_[other].threadgroup_calls) + " matmul2d calls of the threadgroup before " + where +
           " as by thread " + std::to_string(other),
       std::to_string(lanes_[current_].threadgroup_calls) + " by thread " + std::to_string(current_), site);
}

void Worker::complete(Simdgroup& group, std::uint32_t skip_lane) {
  const std::uint32_t base = static_cast<std::uint32_t>(&group - simdgroups_.get()) * kLanes;
  const std::uint32_t lanes = group.arrived;
  const std::uint32_t first = base + static_cast<std::uint32_t>(std::countr_zero(lanes));
  SimdOperation& operation = group.operations[lanes_[first].phase];
  operation.live = lanes;
  group.compute(operation);
  group.arrived = group.calls_used = 0;
  group.calls_before = lanes_[first].matrix_calls;
  for (std::uint32_t bits = lanes; bits != 0; bits &= bits - 1) {
    const std::uint32_t lane = base + static_cast<std::uint32_t>(std::countr_zero(bits));
    lanes_[lane].phase ^= 1;
    lanes_[lane].waits_for = nullptr;
    if (lane != skip_lane) ready(lane);
  }
  cursor_ = group.first_position;  // stay with this simdgroup: its stacks are in the cache
}

void Worker::simd_meet(SimdFunction compute, const char* name, Site site) {
  Lane& lane = lanes_[current_];
  Simdgroup& group = simdgroups_[current_ / kLanes];
  lane.waits_for = name;
  lane.site = site;
  check_meeting(group.arrived);
  group.arrived |= 1u << (current_ % kLanes);
  group.compute = compute;
  if (group.arrived == group.alive) {
    complete(group, current_);
  } else {
    suspend();
  }
}

void Worker::barrier(Site site) {
  Lane& lane = lanes_[current_];
  Simdgroup& group = simdgroups_[current_ / kLanes];
  lane.waits_for = "threadgroup_barrier";
  lane.site = site;
  if (finished_ != 0) {
    std::uint32_t returned = 0;
    while (!lanes_[returned].finished) ++returned;
    fail("every thread at this barrier", "thread " + std::to_string(returned) + " returned", site);
  }
  check_meeting(group.barrier);
  if (at_barrier_ == 0) {
    barrier_site_ = site;
    barrier_lane_ = current_;
  } else if (!same_place(barrier_site_, site)) {
    fail("every thread at the barrier of " + place(barrier_site_) + " as thread " + std::to_string(barrier_lane_),
         "thread " + std::to_string(current_) + " at another one", site);
  } else {
    check_threadgroup_calls(barrier_lane_, "this barrier", site);
  }
  group.barrier |= 1u << (current_ % kLanes);
  if (++at_barrier_ < threads_) {
    suspend();
    return;
  }
  at_barrier_ = cursor_ = 0;
  for (std::uint32_t g = 0; g * kLanes < threads_; ++g) {
    simdgroups_[g].barrier = simdgroups_[g].calls_used = 0;
    simdgroups_[g].calls_before = lanes_[g * kLanes].matrix_calls;
  }
  for (std::uint32_t i = 0; i < threads_; ++i) {
    ready_[i / 64] |= std::uint64_t{1} << (i % 64);
    lanes_[i].waits_for = nullptr;
  }
  suspend();
}

MatrixCall& Worker::matrix_call(const void* memory, Site site, bool& first) {
  Lane& lane = lanes_[current_];
  Simdgroup& group = simdgroups_[current_ / kLanes];
  const std::uint32_t index = lane.matrix_calls - group.calls_before;
  lane.matrix_site = site;
  ++lane.matrix_calls;
  first = index == group.calls_used;
  if (first) {
    if (current_ / kLanes * kLanes + kLanes > threads_) {
      fail("a matrix call in whole simdgroups", std::to_string(threads_) + " threads", site);
    }
    if (index == group.calls.size()) group.calls.push_back(std::make_unique<MatrixCall>());
    ++group.calls_used;
    MatrixCall& call = *group.calls[index];
    call.shared = false;
    call.site = site;
    call.memory = memory;
    return call;
  }
  MatrixCall& call = *group.calls[index];
  if (!same_place(call.site, site) || call.memory != memory) {
    fail("all lanes at the same matrix call and memory as at " + place(call.site),
         "thread " + std::to_string(current_) + " at another", site);
  }
  return call;
}

MatrixCall& Worker::tensor_call(std::uint32_t simdgroups, const void* memory, Site site, bool& first) {
  if (simdgroups != 1) {
    if (simdgroups * kLanes != threads_) {
      fail("matmul2d of the " + std::to_string((threads_ + kLanes - 1) / kLanes) + " simdgroups that were dispatched",
           "one of " + std::to_string(simdgroups), site);
    }
    ++lanes_[current_].threadgroup_calls;
  }
  return matrix_call(memory, site, first);
}

void Worker::fail(const std::string& expected, const std::string& got, Site site) {
  const std::string where = std::string("kernel ") + threadgroup_.kernel->info.name + ", " + place(site);
  error_ = expected_got(where + ", threadgroup " + std::to_string(threadgroup_.index), expected, got);
  throw LaneFailure();
}

void Worker::fail_deadlock() {
  std::string waiting;
  Site site;
  const char* previous = nullptr;
  for (std::uint32_t i = 0; i < threads_; ++i) {
    const Lane& lane = lanes_[i];
    if (lane.finished || lane.waits_for == nullptr) continue;
    if (previous != nullptr && std::strcmp(previous, lane.waits_for) == 0) continue;
    if (previous == nullptr) site = lane.site;
    previous = lane.waits_for;
    waiting += (waiting.empty() ? "" : "; ") + ("thread " + std::to_string(i)) + " at the " + lane.waits_for + " of " +
               place(lane.site);
    if (waiting.size() > 400) break;
  }
  fail("all lanes to meet", waiting, site);
}

void Worker::fail_returned_lane(std::uint32_t source) {
  const std::uint32_t base = current_ / kLanes * kLanes;
  const Simdgroup& group = simdgroups_[current_ / kLanes];
  const Lane& waiting = lanes_[base + static_cast<std::uint32_t>(std::countr_zero(group.arrived))];
  fail(std::string("a ") + waiting.waits_for + " from a lane that runs", "lane " + std::to_string(source) + " returned",
       waiting.site);
}

std::uint32_t lane_in_simdgroup() { return this_worker->lane_in_simdgroup(); }
SimdOperation& simd_operation() { return this_worker->simd_operation(); }
void simd_meet(SimdFunction compute, const char* name, Site site) { this_worker->simd_meet(compute, name, site); }
void threadgroup_barrier(Site site) { this_worker->barrier(site); }
MatrixCall& matrix_call(const void* memory, Site site, bool& first) {
  return this_worker->matrix_call(memory, site, first);
}
MatrixCall& tensor_call(std::uint32_t simdgroups, const void* memory, Site site, bool& first) {
  return this_worker->tensor_call(simdgroups, memory, site, first);
}
std::uint32_t thread_in_threadgroup() { return this_worker->thread_in_threadgroup(); }
bool elements_in_fours() { return this_worker->elements_in_fours(); }
void fail_call(const std::string& expected, const std::string& got, Site site) {
  this_worker->fail(expected, got, site);
}
void fail_returned_lane(std::uint32_t lane) { this_worker->fail_returned_lane(lane); }
void* threadgroup_memory(const void* key, std::size_t bytes, const char* name, Site site) {
  return this_worker->threadgroup_memory(key, bytes, name, site);
}

}  // namespace expertile::emulator
