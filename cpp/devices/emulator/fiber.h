// fiber.h: stacks and the switch between them.
#pragma once

#include <cstddef>
#include <vector>

namespace expertile::emulator {

struct Stack {
  std::byte* bottom = nullptr;
  std::size_t bytes = 0;
};

// A suspended computation: where its stack stands.
struct Context {
  void* stack_pointer = nullptr;
  Stack stack;                 // empty for the thread's own
  void* fake_stack = nullptr;  // AddressSanitizer's
};

// Makes `context` start `entry` on `stack` when it is first switched to. `entry` never returns.
void make_context(Context& context, const Stack& stack, std::size_t stagger, void (*entry)());
// Saves the present computation in `from` (nullptr = it has ended) and continues `to`.
void switch_context(Context* from, Context& to);
// First call of an `entry`: tells AddressSanitizer that it has arrived, and learns the thread's own stack.
void arrived_in_context(Context* caller);

// Stacks of one worker, kept across launches.
class StackPool {
 public:
  StackPool() = default;
  StackPool(const StackPool&) = delete;
  StackPool& operator=(const StackPool&) = delete;
  ~StackPool();
  Stack acquire();  // throws DeviceError where memory ends
  void release(const Stack& stack) { free_.push_back(stack); }
  // All stacks are free again; false when one of them was used to its very end.
  bool reset();

 private:
  void grow();
  std::vector<Stack> slabs_;
  std::vector<Stack> stacks_;
  std::vector<Stack> free_;
  std::size_t touched_ = 0;  // stacks_[0 .. touched_) have been handed out
};

}  // namespace expertile::emulator
