#include "devices/cuda/context.h"

namespace expertile::cuda {
namespace {

constexpr int kAttributeMajor = 75, kAttributeMinor = 76;
constexpr unsigned kStreamNonBlocking = 1;

}  // namespace

Context::Context(int ordinal) {
  const Driver& d = driver();
  d.check(d.device_get(&device, ordinal), "cuda device");
  char text[256] = {};
  d.check(d.device_name(text, sizeof(text) - 1, device), "cuda device");
  name = text;
  d.check(d.device_attribute(&major, kAttributeMajor, device), "cuda device");
  d.check(d.device_attribute(&minor, kAttributeMinor, device), "cuda device");
  d.check(d.context_retain(&handle, device), "cuda context");
  try {
    const Current current(*this);
    d.check(d.stream_create(&stream, kStreamNonBlocking), "cuda stream");
  } catch (...) {
    d.context_release(device);
    throw;
  }
}

Context::~Context() {
  const Driver& d = driver();
  if (d.context_push(handle) == kSuccess) {
    d.stream_destroy(stream);
    Handle popped = nullptr;
    d.context_pop(&popped);
  }
  d.context_release(device);
}

}  // namespace expertile::cuda
