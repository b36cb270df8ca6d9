// runtime.h: what metal-cpp uses of the Objective-C runtime. Stands in for the system's header on Linux, for tests.
#pragma once

typedef struct objc_object {
  void* isa;
} objc_object;
typedef struct objc_object* id;
typedef struct objc_selector* SEL;

extern "C" {
SEL sel_registerName(const char* name);
void* objc_lookUpClass(const char* name);
void* objc_getProtocol(const char* name);
}
