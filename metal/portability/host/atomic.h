// atomic.h: Metal's atomics for the host. Threadgroups run on several operating-system threads, so these are real ones.
#pragma once

#include "sync.h"

namespace expertile::msl {
inline namespace EXPERTILE_ISA {
namespace metal {

template <class T>
inline T atomic_load_explicit(const atomic<T>* a, memory_order) {
  T value;
  __atomic_load(&a->value, &value, __ATOMIC_RELAXED);
  return value;
}
template <class T>
inline void atomic_store_explicit(atomic<T>* a, std::type_identity_t<T> value, memory_order) {
  __atomic_store(&a->value, &value, __ATOMIC_RELAXED);
}
template <class T>
inline T atomic_exchange_explicit(atomic<T>* a, std::type_identity_t<T> value, memory_order) {
  T previous;
  __atomic_exchange(&a->value, &value, &previous, __ATOMIC_RELAXED);
  return previous;
}
template <class T>
inline bool atomic_compare_exchange_weak_explicit(atomic<T>* a, T* expected, std::type_identity_t<T> desired,
                                                  memory_order, memory_order) {
  return __atomic_compare_exchange(&a->value, expected, &desired, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

// value = f(value), atomically; returns what was there.
template <class T, class F>
inline T atomic_update(atomic<T>* a, F f) {
  T previous = atomic_load_explicit(a, memory_order_relaxed);
  T next = f(previous);
  while (!__atomic_compare_exchange(&a->value, &previous, &next, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    next = f(previous);
  }
  return previous;
}
template <class T>
inline T atomic_fetch_add_explicit(atomic<T>* a, std::type_identity_t<T> value, memory_order) {
  if constexpr (std::is_integral_v<T>) {
    return __atomic_fetch_add(&a->value, value, __ATOMIC_RELAXED);
  } else {
    return atomic_update(a, [&](T old) { return old + value; });
  }
}
#define EXPERTILE_ATOMIC(name, function)                                     \
  template <class T>                                                         \
  inline T name(atomic<T>* a, std::type_identity_t<T> value, memory_order) { \
    return function(&a->value, value, __ATOMIC_RELAXED);                     \
  }
EXPERTILE_ATOMIC(atomic_fetch_sub_explicit, __atomic_fetch_sub)
EXPERTILE_ATOMIC(atomic_fetch_and_explicit, __atomic_fetch_and)
EXPERTILE_ATOMIC(atomic_fetch_or_explicit, __atomic_fetch_or)
EXPERTILE_ATOMIC(atomic_fetch_xor_explicit, __atomic_fetch_xor)
#undef EXPERTILE_ATOMIC
template <class T>
inline T atomic_fetch_min_explicit(atomic<T>* a, std::type_identity_t<T> value, memory_order) {
  return atomic_update(a, [&](T old) { return value < old ? value : old; });
}
template <class T>
inline T atomic_fetch_max_explicit(atomic<T>* a, std::type_identity_t<T> value, memory_order) {
  return atomic_update(a, [&](T old) { return old < value ? value : old; });
}

}  // namespace metal
}  // namespace EXPERTILE_ISA
}  // namespace expertile::msl
