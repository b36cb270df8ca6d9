// message.h: the entry points of a message; the caller casts them to the method's own type.
#pragma once
#include <objc/runtime.h>

extern "C" {
void objc_msgSend();
void objc_msgSend_stret();
void objc_msgSend_fpret();
}
