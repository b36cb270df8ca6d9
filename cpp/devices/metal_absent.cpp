// metal_absent.cpp: the Metal device where it cannot be built.
#include "devices/metal/device.h"
#include "expertile/error.h"
#include "expertile/metal.h"

namespace expertile {
namespace {

constexpr const char* kWhy = "built for a system without Metal: it needs macOS 14 on Apple silicon";

}  // namespace

DeviceStatus metal_status() { return {"metal", false, kWhy}; }

std::shared_ptr<Device> open_metal_device(const MetalOptions&) {
  throw DeviceError(expected_got("open_device: metal", "a device that is present", kWhy));
}

BufferRef metal_buffer(Device& device, void*, std::uint64_t, std::uint64_t) {
  throw std::invalid_argument(expected_got("metal_buffer", "a metal device", device.kind()));
}

MetalRange metal_handle(const BufferRef&) {
  throw std::invalid_argument(expected_got("metal_handle", "a buffer of a metal device", "another"));
}

}  // namespace expertile
