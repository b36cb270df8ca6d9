// fiber.cpp: a context switch of a dozen instructions; ucontext makes system calls, which take twenty times as long.
#include "devices/emulator/fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstring>

#include "expertile/error.h"

#if defined(__SANITIZE_ADDRESS__)
#define EXPERTILE_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define EXPERTILE_ASAN 1
#endif
#endif
#ifdef EXPERTILE_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#ifndef MAP_NORESERVE
#define MAP_NORESERVE 0
#endif

#if defined(__APPLE__)
#define EXPERTILE_SYMBOL "_expertile_switch_stack"
#else
#define EXPERTILE_SYMBOL "expertile_switch_stack"
#endif

// void expertile_switch_stack(void** save, void* load): pushes the registers that a callee must keep, stores the stack
// pointer in *save, and returns on the stack `load`.
extern "C" void expertile_switch_stack(void** save, void* load);

#if defined(__x86_64__)
__asm__(".text\n.globl " EXPERTILE_SYMBOL "\n.p2align 4\n" EXPERTILE_SYMBOL
        ":\n"
        "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
        "movq %rsp, (%rdi)\nmovq %rsi, %rsp\n"
        "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n");
#elif defined(__aarch64__)
__asm__(".text\n.globl " EXPERTILE_SYMBOL "\n.p2align 4\n" EXPERTILE_SYMBOL
        ":\n"
        "sub sp, sp, #160\n"
        "stp x19, x20, [sp]\nstp x21, x22, [sp, #16]\nstp x23, x24, [sp, #32]\nstp x25, x26, [sp, #48]\n"
        "stp x27, x28, [sp, #64]\nstp x29, x30, [sp, #80]\n"
        "stp d8, d9, [sp, #96]\nstp d10, d11, [sp, #112]\nstp d12, d13, [sp, #128]\nstp d14, d15, [sp, #144]\n"
        "mov x9, sp\nstr x9, [x0]\nmov sp, x1\n"
        "ldp x19, x20, [sp]\nldp x21, x22, [sp, #16]\nldp x23, x24, [sp, #32]\nldp x25, x26, [sp, #48]\n"
        "ldp x27, x28, [sp, #64]\nldp x29, x30, [sp, #80]\n"
        "ldp d8, d9, [sp, #96]\nldp d10, d11, [sp, #112]\nldp d12, d13, [sp, #128]\nldp d14, d15, [sp, #144]\n"
        "add sp, sp, #160\nret\n");
#else
#error "the emulator has a context switch for x86-64 and aarch64"
#endif

namespace expertile::emulator {
namespace {

constexpr std::size_t kSlabStacks = 32;
constexpr std::size_t kCanaryBytes = 64;
#ifdef EXPERTILE_ASAN
constexpr std::size_t kStackBytes = 512 * 1024;  // instrumented frames are larger
#else
constexpr std::size_t kStackBytes = 128 * 1024;
#endif

// AddressSanitizer's marks around the frames of a fiber that was left where it stood.
void forget_poison([[maybe_unused]] const Stack& stack) {
#ifdef EXPERTILE_ASAN
  __asan_unpoison_memory_region(stack.bottom, stack.bytes);
#endif
}

}  // namespace

void make_context(Context& context, const Stack& stack, std::size_t stagger, void (*entry)()) {
  context.stack = stack;
  context.fake_stack = nullptr;
  forget_poison(stack);
  // Stack tops a multiple of the page apart would share a few cache sets.
  std::byte* top = stack.bottom + stack.bytes - 64 * (stagger % 64);
#if defined(__x86_64__)
  void** frame = reinterpret_cast<void**>(top) - 8;  // six registers, the return address, and entry's own (none)
  std::memset(frame, 0, 8 * sizeof(void*));
  frame[6] = reinterpret_cast<void*>(entry);
#else
  void** frame = reinterpret_cast<void**>(top) - 20;
  std::memset(frame, 0, 20 * sizeof(void*));
  frame[11] = reinterpret_cast<void*>(entry);  // x30
#endif
  context.stack_pointer = frame;
}

void switch_context(Context* from, Context& to) {
  void* discarded = nullptr;
#ifdef EXPERTILE_ASAN
  __sanitizer_start_switch_fiber(from != nullptr ? &from->fake_stack : nullptr, to.stack.bottom, to.stack.bytes);
#endif
  expertile_switch_stack(from != nullptr ? &from->stack_pointer : &discarded, to.stack_pointer);
#ifdef EXPERTILE_ASAN
  __sanitizer_finish_switch_fiber(from->fake_stack, nullptr, nullptr);
#endif
}

void arrived_in_context(Context* caller) {
#ifdef EXPERTILE_ASAN
  const void* bottom = nullptr;
  std::size_t bytes = 0;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
  if (caller != nullptr && caller->stack.bottom == nullptr) {
    caller->stack = {const_cast<std::byte*>(static_cast<const std::byte*>(bottom)), bytes};
  }
#else
  static_cast<void>(caller);
#endif
}

StackPool::~StackPool() {
  for (const Stack& slab : slabs_) {
    forget_poison(slab);  // who gets the memory next knows nothing of our frames
    munmap(slab.bottom, slab.bytes);
  }
}

void StackPool::grow() {
  const std::size_t bytes = kSlabStacks * kStackBytes;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    throw DeviceError(expected_got("emulator", std::to_string(bytes) + " bytes of stacks", "none"));
  }
  std::byte* bottom = static_cast<std::byte*>(memory);
  slabs_.push_back({bottom, bytes});
  for (std::size_t i = 0; i < kSlabStacks; ++i) stacks_.push_back({bottom + i * kStackBytes, kStackBytes});
}

Stack StackPool::acquire() {
  if (!free_.empty()) {
    const Stack stack = free_.back();
    free_.pop_back();
    return stack;
  }
  if (touched_ == stacks_.size()) grow();
  return stacks_[touched_++];
}

bool StackPool::reset() {
  bool intact = true;
  for (std::size_t i = 0; i < touched_; ++i) {
    const std::byte* canary = stacks_[i].bottom;
    for (std::size_t j = 0; j < kCanaryBytes; ++j) intact = intact && canary[j] == std::byte{0};
    if (!intact) std::memset(stacks_[i].bottom, 0, kCanaryBytes);
  }
  free_.clear();
  touched_ = 0;
  return intact;
}

}  // namespace expertile::emulator
