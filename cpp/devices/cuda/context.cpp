#include "devices/cuda/context.h"

#include "expertile/error.h"

namespace expertile::cuda {
namespace {

constexpr int kAttributeMajor = 75, kAttributeMinor = 76;
constexpr unsigned kStreamNonBlocking = 1;

constexpr std::uint64_t kLastDefaultStream = 2;  // 0, 1 (legacy) and 2 (of the thread) name no context

// The context that a stream lives in, and the device of that.
Handle context_of(Handle stream, int& device) {
  const Driver& d = driver();
  Handle context = nullptr;
  d.check(d.stream_context(stream, &context), "cuda stream");
  d.check(d.context_push(context), "cuda stream");
  const Result result = d.context_device(&device);
  Handle popped = nullptr;
  d.context_pop(&popped);
  d.check(result, "cuda stream");
  return context;
}

}  // namespace

void Context::adopt_stream(std::uint64_t callers) {
  stream = reinterpret_cast<Handle>(callers);
  owns_stream = false;
}

Context::Context(std::optional<std::uint64_t> callers_stream) {
  const Driver& d = driver();
  d.check(d.device_get(&device, 0), "cuda device");
  Handle streams_context = nullptr;
  if (callers_stream) {
    adopt_stream(*callers_stream);
    if (*callers_stream > kLastDefaultStream) streams_context = context_of(stream, device);
  }
  char text[256] = {};
  d.check(d.device_name(text, sizeof(text) - 1, device), "cuda device");
  name = text;
  d.check(d.device_attribute(&major, kAttributeMajor, device), "cuda device");
  d.check(d.device_attribute(&minor, kAttributeMinor, device), "cuda device");
  d.check(d.context_retain(&handle, device), "cuda context");
  if (streams_context && streams_context != handle) {
    d.context_release(device);
    throw std::invalid_argument(
        expected_got("open_device: stream", "one of the primary context of its GPU", "one of another context"));
  }
  if (!owns_stream) return;
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
    if (owns_stream) d.stream_destroy(stream);
    Handle popped = nullptr;
    d.context_pop(&popped);
  }
  d.context_release(device);
}

}  // namespace expertile::cuda
