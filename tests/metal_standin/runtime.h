// runtime.h: a small Objective-C runtime, strict where the real one is silent.
//
// Unknown selectors, messages to nil or to a freed object, releases too many, autoreleases without a pool: each is a
// fault that names itself. A fault is recorded and thrown; where nothing may be thrown (a release) it is recorded only.
#pragma once

#include <objc/message.h>
#include <objc/runtime.h>

#include <atomic>
#include <initializer_list>
#include <map>
#include <string>
#include <vector>

namespace standin {

[[noreturn]] void fault(const std::string& what);  // recorded, and thrown as DeviceError
void note_fault(const std::string& what);          // recorded only
std::vector<std::string> take_faults();            // those recorded since the last call

struct Class;

// What an id points to.
struct Object {
  Object() = default;
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;
  virtual ~Object() = default;
  // At the last release, before the object becomes a zombie: frees what it holds.
  virtual void dispose() {}

  Class* isa = nullptr;  // nullptr = a class itself
  std::atomic<long> references{1};
};

struct Method {
  const char* selector;
  void* function;
};

// A function with the signature result(Object*, SEL, arguments ...) as a method.
template <class Result, class... Arguments>
Method method(const char* selector, Result (*function)(Arguments...)) {
  return {selector, reinterpret_cast<void*>(function)};
}

struct Class : Object {
  const char* name = "";
  std::map<SEL, void*> of_class, of_instance;
};

// Both are called once, before the first look-up.
void define(const char* name, std::initializer_list<Method> of_class, std::initializer_list<Method> of_instance);
void define_foundation();
void define_metal();

// A new object of a defined class, counted among the living.
template <class T>
T* make(const char* name, T* object);

void retain(Object* object);
void release(Object* object);
void autorelease(Object* object);
template <class T>
T* autoreleased(T* object) {
  autorelease(object);
  return object;
}

// Living objects by class.
std::map<std::string, long> living();

Class* class_named(const std::string& name);
void count_living(Object* object, long by);

template <class T>
T* make(const char* name, T* object) {
  object->isa = class_named(name);
  count_living(object, 1);
  return object;
}

// Pools of this thread, as NSAutoreleasePool's methods use them.
void push_pool(Object* pool);
void pop_pool(Object* pool);

}  // namespace standin
