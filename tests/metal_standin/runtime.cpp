// runtime.cpp: classes, selectors, counts, pools, and the look-up behind every message.
#include "runtime.h"

#include <deque>
#include <mutex>
#include <set>
#include <utility>

#include "expertile/error.h"

namespace standin {
namespace {

// Static initialisers of metal-cpp look selectors and classes up: everything lives in function-local statics.
struct Tables {
  std::recursive_mutex mutex;
  std::set<std::string> selectors;
  std::map<std::string, Class*> classes;
  std::map<std::string, long> living;
  std::vector<std::string> faults;
  std::deque<Object*> zombies;  // freed, kept for a while so that a late message is seen
};

constexpr std::size_t kZombies = 1 << 14;
constexpr long kDead = -1000000000;

Tables& tables() {
  static auto* all = new Tables;
  return *all;
}

Tables& defined() {
  static const bool once = [] {
    define_foundation();
    define_metal();
    return true;
  }();
  static_cast<void>(once);
  return tables();
}

struct Pool {
  Object* pool;
  std::vector<Object*> objects;
};
thread_local std::vector<Pool> pools;

const char* class_name(const Object* object) {
  return object->isa != nullptr ? object->isa->name : static_cast<const Class*>(object)->name;
}

SEL interned(const char* name) {
  Tables& all = tables();
  const std::lock_guard lock(all.mutex);
  return reinterpret_cast<SEL>(const_cast<char*>(all.selectors.insert(name).first->c_str()));
}

// Methods that every object has.
Object* retain_method(Object* self, SEL) {
  retain(self);
  return self;
}
void release_method(Object* self, SEL) { release(self); }
Object* autorelease_method(Object* self, SEL) { return autoreleased(self); }
unsigned long count_method(Object* self, SEL) { return static_cast<unsigned long>(self->references.load()); }
Object* init_method(Object* self, SEL) { return self; }
Object* signature_method(Object*, SEL, SEL) { return nullptr; }
void* common_method(SEL selector);
bool responds_method(Object* self, SEL, SEL asked) {
  return self->isa->of_instance.contains(asked) || common_method(asked) != nullptr;
}

void* common_method(SEL selector) {
  static const std::map<SEL, void*> common = {
      {interned("retain"), reinterpret_cast<void*>(&retain_method)},
      {interned("release"), reinterpret_cast<void*>(&release_method)},
      {interned("autorelease"), reinterpret_cast<void*>(&autorelease_method)},
      {interned("retainCount"), reinterpret_cast<void*>(&count_method)},
      {interned("init"), reinterpret_cast<void*>(&init_method)},
      {interned("respondsToSelector:"), reinterpret_cast<void*>(&responds_method)},
      {interned("methodSignatureForSelector:"), reinterpret_cast<void*>(&signature_method)},
  };
  const auto found = common.find(selector);
  return found == common.end() ? nullptr : found->second;
}

}  // namespace

void note_fault(const std::string& what) {
  Tables& all = tables();
  const std::lock_guard lock(all.mutex);
  all.faults.push_back(what);
}

void fault(const std::string& what) {
  note_fault(what);
  throw expertile::DeviceError("[metal stand-in] " + what);
}

std::vector<std::string> take_faults() {
  Tables& all = tables();
  const std::lock_guard lock(all.mutex);
  return std::exchange(all.faults, {});
}

void define(const char* name, std::initializer_list<Method> of_class, std::initializer_list<Method> of_instance) {
  auto* added = new Class;
  added->name = name;
  for (const Method& m : of_class) added->of_class[interned(m.selector)] = m.function;
  for (const Method& m : of_instance) added->of_instance[interned(m.selector)] = m.function;
  tables().classes[name] = added;
}

Class* class_named(const std::string& name) {
  Tables& all = defined();
  const auto found = all.classes.find(name);
  return found == all.classes.end() ? nullptr : found->second;
}

void count_living(Object* object, long by) {
  Tables& all = tables();
  const std::lock_guard lock(all.mutex);
  all.living[class_name(object)] += by;
}

std::map<std::string, long> living() {
  Tables& all = tables();
  const std::lock_guard lock(all.mutex);
  std::map<std::string, long> now;
  for (const auto& [name, count] : all.living) {
    if (count != 0) now[name] = count;
  }
  return now;
}

void retain(Object* object) {
  if (object->isa != nullptr) ++object->references;
}

void release(Object* object) {
  if (object->isa == nullptr) return;
  const long left = --object->references;
  if (left > 0) return;
  object->references = kDead;
  object->dispose();
  count_living(object, -1);
  Tables& all = tables();
  const std::lock_guard lock(all.mutex);
  all.zombies.push_back(object);
  if (all.zombies.size() > kZombies) {
    delete all.zombies.front();
    all.zombies.pop_front();
  }
}

void autorelease(Object* object) {
  if (pools.empty()) fault(std::string("autorelease of a ") + class_name(object) + " without a pool: it would leak");
  pools.back().objects.push_back(object);
}

void push_pool(Object* pool) { pools.push_back({pool, {}}); }

void pop_pool(Object* pool) {
  while (!pools.empty()) {
    const Pool top = std::move(pools.back());
    pools.pop_back();
    for (Object* object : top.objects) release(object);
    if (top.pool == pool) return;
    note_fault("an autorelease pool outlives the one around it");
  }
  note_fault("an autorelease pool is drained by another thread than its own");
}

Object* nil_method(Object*, SEL) { return nullptr; }

// The method behind a message; called by the assembly below, which then jumps to it.
extern "C" __attribute__((used, visibility("hidden"))) void* standin_method(Object* receiver, SEL selector) {
  const std::string name = reinterpret_cast<const char*>(selector);
  // NS::SharedPtr retains and releases whatever it holds, nil too, and from destructors, which must not throw.
  const bool counts = name == "retain" || name == "release";
  if (receiver == nullptr && counts) return reinterpret_cast<void*>(&nil_method);
  if (receiver == nullptr) fault("message " + name + " to nil");
  if (receiver->references < 0 && counts) {
    note_fault(name + " of a freed " + class_name(receiver));
    return reinterpret_cast<void*>(&nil_method);
  }
  if (receiver->references < 0) fault("message " + name + " to a freed " + class_name(receiver));
  Class* isa = receiver->isa != nullptr ? receiver->isa : static_cast<Class*>(receiver);
  const std::map<SEL, void*>& methods = receiver->isa != nullptr ? isa->of_instance : isa->of_class;
  const auto found = methods.find(selector);
  if (found != methods.end()) return found->second;
  if (void* common = common_method(selector); common != nullptr && receiver->isa != nullptr) return common;
  fault("unrecognized selector " + std::string(receiver->isa != nullptr ? "-" : "+") + "[" + isa->name + " " + name +
        "]");
}

}  // namespace standin

extern "C" {
SEL sel_registerName(const char* name) { return standin::interned(name); }
void* objc_lookUpClass(const char* name) { return standin::class_named(name); }
void* objc_getProtocol(const char*) { return nullptr; }
}

// Saves every register that may hold an argument, finds the method, restores them and jumps: the method sees the
// caller's own call. An exception thrown by the look-up passes through the frame, one thrown by the method never
// meets it.
#if defined(__x86_64__)
// A method that returns a large struct gets the struct's address first, the receiver second.
#define STANDIN_MESSAGE(entry, receiver, selector) \
  asm(".text\n"                                    \
      ".globl " entry                              \
      "\n"                                         \
      ".hidden " entry                             \
      "\n"                                         \
      ".type " entry ", @function\n" entry         \
      ":\n"                                        \
      ".cfi_startproc\n"                           \
      "pushq %rbp\n"                               \
      ".cfi_def_cfa_offset 16\n"                   \
      ".cfi_offset %rbp, -16\n"                    \
      "movq %rsp, %rbp\n"                          \
      ".cfi_def_cfa_register %rbp\n"               \
      "subq $192, %rsp\n"                          \
      "movq %rdi, 0(%rsp)\n"                       \
      "movq %rsi, 8(%rsp)\n"                       \
      "movq %rdx, 16(%rsp)\n"                      \
      "movq %rcx, 24(%rsp)\n"                      \
      "movq %r8, 32(%rsp)\n"                       \
      "movq %r9, 40(%rsp)\n"                       \
      "movq %rax, 48(%rsp)\n"                      \
      "movaps %xmm0, 64(%rsp)\n"                   \
      "movaps %xmm1, 80(%rsp)\n"                   \
      "movaps %xmm2, 96(%rsp)\n"                   \
      "movaps %xmm3, 112(%rsp)\n"                  \
      "movaps %xmm4, 128(%rsp)\n"                  \
      "movaps %xmm5, 144(%rsp)\n"                  \
      "movaps %xmm6, 160(%rsp)\n"                  \
      "movaps %xmm7, 176(%rsp)\n"                  \
      "movq " receiver                             \
      ", %rdi\n"                                   \
      "movq " selector                             \
      ", %rsi\n"                                   \
      "call standin_method\n"                      \
      "movq %rax, %r11\n"                          \
      "movq 0(%rsp), %rdi\n"                       \
      "movq 8(%rsp), %rsi\n"                       \
      "movq 16(%rsp), %rdx\n"                      \
      "movq 24(%rsp), %rcx\n"                      \
      "movq 32(%rsp), %r8\n"                       \
      "movq 40(%rsp), %r9\n"                       \
      "movq 48(%rsp), %rax\n"                      \
      "movaps 64(%rsp), %xmm0\n"                   \
      "movaps 80(%rsp), %xmm1\n"                   \
      "movaps 96(%rsp), %xmm2\n"                   \
      "movaps 112(%rsp), %xmm3\n"                  \
      "movaps 128(%rsp), %xmm4\n"                  \
      "movaps 144(%rsp), %xmm5\n"                  \
      "movaps 160(%rsp), %xmm6\n"                  \
      "movaps 176(%rsp), %xmm7\n"                  \
      "leave\n"                                    \
      ".cfi_def_cfa %rsp, 8\n"                     \
      "jmpq *%r11\n"                               \
      ".cfi_endproc\n"                             \
      ".size " entry ", .-" entry "\n")
STANDIN_MESSAGE("objc_msgSend", "0(%rsp)", "8(%rsp)");
STANDIN_MESSAGE("objc_msgSend_fpret", "0(%rsp)", "8(%rsp)");
STANDIN_MESSAGE("objc_msgSend_stret", "8(%rsp)", "16(%rsp)");
#elif defined(__aarch64__)
asm(".text\n"
    ".globl objc_msgSend\n"
    ".hidden objc_msgSend\n"
    ".type objc_msgSend, %function\n"
    "objc_msgSend:\n"
    ".cfi_startproc\n"
    "stp x29, x30, [sp, #-224]!\n"
    ".cfi_def_cfa_offset 224\n"
    ".cfi_offset 29, -224\n"
    ".cfi_offset 30, -216\n"
    "mov x29, sp\n"
    ".cfi_def_cfa_register 29\n"
    "stp x0, x1, [sp, #16]\n"
    "stp x2, x3, [sp, #32]\n"
    "stp x4, x5, [sp, #48]\n"
    "stp x6, x7, [sp, #64]\n"
    "str x8, [sp, #80]\n"
    "stp q0, q1, [sp, #96]\n"
    "stp q2, q3, [sp, #128]\n"
    "stp q4, q5, [sp, #160]\n"
    "stp q6, q7, [sp, #192]\n"
    "bl standin_method\n"
    "mov x17, x0\n"
    "ldp x0, x1, [sp, #16]\n"
    "ldp x2, x3, [sp, #32]\n"
    "ldp x4, x5, [sp, #48]\n"
    "ldp x6, x7, [sp, #64]\n"
    "ldr x8, [sp, #80]\n"
    "ldp q0, q1, [sp, #96]\n"
    "ldp q2, q3, [sp, #128]\n"
    "ldp q4, q5, [sp, #160]\n"
    "ldp q6, q7, [sp, #192]\n"
    ".cfi_def_cfa 31, 224\n"
    "ldp x29, x30, [sp], #224\n"
    ".cfi_def_cfa_offset 0\n"
    ".cfi_restore 29\n"
    ".cfi_restore 30\n"
    "br x17\n"
    ".cfi_endproc\n"
    ".size objc_msgSend, .-objc_msgSend\n");
#else
#error "metal stand-in: no objc_msgSend for this processor"
#endif
