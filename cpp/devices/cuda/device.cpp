#include "devices/cuda/device.h"

#include <algorithm>
#include <mutex>

#include "devices/cuda/compiler.h"
#include "devices/cuda/graph.h"
#include "devices/cuda/kernels.h"
#include "devices/launch_check.h"
#include "expertile/error.h"
#include "expertile/program.h"

namespace expertile {
namespace cuda {
namespace {

constexpr int kLowestCapability = 80;  // the matrix instructions of tile_mma.h
// CUpointer_attribute, CUmemorytype
constexpr int kPointerMemoryType = 2, kPointerDevice = 9, kPointerRangeStart = 11, kPointerRangeSize = 12;
constexpr unsigned kMemoryOfDevice = 2;
constexpr std::uint64_t kCopyBytes = 256ull << 20;  // one piece of a copy

class CudaBuffer final : public Buffer {
 public:
  CudaBuffer(ContextRef context, std::uint64_t bytes) : context_(std::move(context)) {
    const Driver& d = driver();
    DevicePointer pointer = 0;
    const Result result = d.memory_alloc(&pointer, bytes);
    if (result == kOutOfMemory) {
      std::size_t free = 0, total = 0;
      d.memory_info(&free, &total);
      throw DeviceError(expected_got("alloc", std::to_string(bytes) + " bytes of device memory",
                                     std::to_string(free) + " free of " + std::to_string(total)));
    }
    d.check(result, "alloc of " + std::to_string(bytes) + " bytes");
    bytes_ = bytes;
    address_ = pointer;
  }
  ~CudaBuffer() override {
    const Driver& d = driver();
    if (d.context_push(context_->handle) != kSuccess) return;
    d.memory_free(address_);
    Handle popped = nullptr;
    d.context_pop(&popped);
  }

 private:
  ContextRef context_;
};

// The caller's memory on this GPU.
class AdoptedBuffer final : public Buffer {
 public:
  AdoptedBuffer(const Context& context, std::uint64_t address, std::uint64_t bytes) {
    const auto refuse = [&](const std::string& got) {
      throw std::invalid_argument(
          expected_got("adopt of " + std::to_string(bytes) + " bytes",
                       "memory of " + context.name + " (GPU " + std::to_string(context.device) + ")", got));
    };
    if (address == 0 || bytes == 0) refuse(std::to_string(bytes) + " bytes at " + std::to_string(address));
    const Driver& d = driver();
    unsigned type = 0;
    int device = -1;
    DevicePointer start = 0;
    std::size_t size = 0;
    if (d.pointer_attribute(&type, kPointerMemoryType, address) != kSuccess) refuse("memory that CUDA does not know");
    if (type != kMemoryOfDevice) refuse("host memory");
    d.check(d.pointer_attribute(&device, kPointerDevice, address), "adopt");
    if (device != context.device) refuse("memory of GPU " + std::to_string(device));
    d.check(d.pointer_attribute(&start, kPointerRangeStart, address), "adopt");
    d.check(d.pointer_attribute(&size, kPointerRangeSize, address), "adopt");
    const std::uint64_t left = size - (address - start);
    if (bytes > left) refuse(std::to_string(left) + " bytes up to the end of its allocation");
    bytes_ = bytes;
    address_ = address;
  }
};

void check_range(const char* where, const BufferRef& buffer, std::uint64_t offset, std::uint64_t bytes) {
  if (!buffer || offset > buffer->bytes() || bytes > buffer->bytes() - offset) {
    throw std::invalid_argument(
        expected_got(where, "a range inside the buffer's " + std::to_string(buffer ? buffer->bytes() : 0) + " bytes",
                     std::to_string(offset) + " + " + std::to_string(bytes)));
  }
}

class CudaDevice final : public Device {
 public:
  explicit CudaDevice(const DeviceOptions& options)
      : context_(std::make_shared<Context>(options.stream)), kernels_(context_, options.threads) {}

  const char* kind() const override { return "cuda"; }
  std::string name() const override { return context_->name; }

  BufferRef alloc(std::uint64_t bytes, const std::byte* source) override {
    if (bytes == 0) throw std::invalid_argument(expected_got("alloc", "at least 1 byte", 0));
    BufferRef buffer;
    {
      const Current current(*context_);
      buffer = std::make_shared<CudaBuffer>(context_, bytes);
    }
    if (source) write(buffer, 0, source, bytes);
    return buffer;
  }

  void write(const BufferRef& to, std::uint64_t offset, const void* from, std::uint64_t bytes) override {
    check_range("write", to, offset, bytes);
    const auto* source = static_cast<const std::byte*>(from);
    copy("write", bytes, [&](const Driver& d, std::uint64_t done, std::uint64_t size) {
      return d.copy_to_device(to->address() + offset + done, source + done, size, context_->stream);
    });
  }

  void read(const BufferRef& from, std::uint64_t offset, void* to, std::uint64_t bytes) override {
    check_range("read", from, offset, bytes);
    auto* target = static_cast<std::byte*>(to);
    copy("read", bytes, [&](const Driver& d, std::uint64_t done, std::uint64_t size) {
      return d.copy_to_host(target + done, from->address() + offset + done, size, context_->stream);
    });
  }

  BufferRef adopt(std::uint64_t address, std::uint64_t bytes) override {
    const Current current(*context_);
    return std::make_shared<AdoptedBuffer>(*context_, address, bytes);
  }

  void copy(const BufferRef& to, std::uint64_t to_offset, const BufferRef& from, std::uint64_t from_offset,
            std::uint64_t bytes) override {
    check_range("copy: to", to, to_offset, bytes);
    check_range("copy: from", from, from_offset, bytes);
    copy("copy", bytes, [&](const Driver& d, std::uint64_t done, std::uint64_t size) {
      return d.copy_on_device(to->address() + to_offset + done, from->address() + from_offset + done, size,
                              context_->stream);
    });
  }

  void wait_for_caller() override {
    if (!context_->owns_stream) return;
    const Current current(*context_);
    driver().check(driver().context_wait(), "wait_for_caller");
  }

  void prepare(Program& program) override {
    const std::lock_guard lock(mutex_);
    std::vector<std::string> names;
    for (const Group& group : program.groups) {
      for (const Launch& launch : group.launches) {
        // The bench's own kernels are not in the table.
        check_exact(launch, "cuda");
        if (const KernelInfo* kernel = find_kernel(launch.kernel)) check_launch(launch, *kernel);
        names.push_back(launch.kernel);
      }
    }
    kernels_.prepare(names);
    for (Group& group : program.groups) {
      for (Launch& launch : group.launches) launch.pipeline = &kernels_.at(launch.kernel);
    }
    program.prepared.reset();
    if (names.empty()) return;
    const Current current(*context_);
    program.prepared = std::make_shared<Graph>(context_, program);
  }

  double run(const Program& program) override {
    if (program.groups.empty()) return 0;
    if (!program.prepared)
      throw std::invalid_argument(expected_got("run: " + program.name, "a prepared program", "none"));
    const std::lock_guard lock(mutex_);
    const Current current(*context_);
    return static_cast<const Graph*>(program.prepared.get())->run(program);
  }

 private:
  template <class Piece>
  void copy(const char* where, std::uint64_t bytes, const Piece& piece) {
    const std::lock_guard lock(mutex_);
    const Current current(*context_);
    const Driver& d = driver();
    for (std::uint64_t done = 0; done < bytes; done += kCopyBytes) {
      const std::uint64_t size = std::min(kCopyBytes, bytes - done);
      d.check(piece(d, done, size), std::string(where) + " of " + std::to_string(bytes) + " bytes");
    }
    d.check(d.stream_wait(context_->stream), std::string(where) + " of " + std::to_string(bytes) + " bytes");
  }

  std::mutex mutex_;  // one stream, one call at a time
  ContextRef context_;
  Kernels kernels_;
};

// Why there is no device, or "" with its name.
std::string absence(std::string& name) {
  const Driver& d = driver();
  if (!d.absent.empty()) return d.absent;
  if (!compiler_absent().empty()) return compiler_absent();
  const Context context(std::nullopt);
  const int capability = context.major * 10 + context.minor;
  name = context.name;
  if (capability < kLowestCapability) {
    return name + " has compute capability " + std::to_string(context.major) + "." + std::to_string(context.minor) +
           ", 8.0 is needed";
  }
  return "";
}

}  // namespace
}  // namespace cuda

DeviceStatus cuda_status() {
  try {
    std::string name;
    const std::string why = cuda::absence(name);
    return {"cuda", why.empty(), why.empty() ? name : why};
  } catch (const DeviceError& error) {
    return {"cuda", false, error.what()};
  }
}

std::shared_ptr<Device> make_cuda_device(const DeviceOptions& options) {
  const DeviceStatus status = cuda_status();
  if (!status.present) throw DeviceError(expected_got("open_device: cuda", "an NVIDIA GPU", status.detail));
  return std::make_shared<cuda::CudaDevice>(options);
}

}  // namespace expertile
