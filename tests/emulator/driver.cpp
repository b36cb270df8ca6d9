// driver.cpp: one launch on the emulator, called from Python through ctypes.
#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include "devices/emulator/emulator.h"
#include "expertile/error.h"

namespace {

struct Call {
  const char* kernel;
  const char* order;
  std::uint64_t seed;
  std::int32_t threads;
  std::uint32_t n_buffers;
  const void* args;
  std::uint64_t args_bytes;
  void* const* data;            // read and written
  const std::uint64_t* bytes;   // of each buffer's binding
  const std::uint8_t* written;  // 1 = ReadWrite
  std::uint32_t grid[3];
  std::int32_t indirect;  // buffer with the grid at its start, -1 = direct
  std::uint32_t max_grid[3];
};

void launch(const Call& call) {
  using namespace expertile;
  auto device = emulator::make_emulator_device({call.threads, call.order, call.seed, true});
  Launch launch;
  launch.kernel = call.kernel;
  const std::byte* args = static_cast<const std::byte*>(call.args);
  launch.args.assign(args, args + call.args_bytes);
  for (std::uint32_t i = 0; i < call.n_buffers; ++i) {
    Binding binding;
    binding.buffer = device->alloc(call.bytes[i] != 0 ? call.bytes[i] : 4);
    binding.access = call.written[i] != 0 ? Access::ReadWrite : Access::Read;
    binding.bytes = call.bytes[i];
    binding.name = "data" + std::to_string(i);
    device->write(binding.buffer, 0, call.data[i], call.bytes[i]);
    launch.buffers.push_back(binding);
  }
  for (int i = 0; i < 3; ++i) {
    launch.grid.size[static_cast<std::size_t>(i)] = call.grid[i];
    launch.grid.max_grid[static_cast<std::size_t>(i)] = call.max_grid[i];
  }
  if (call.indirect >= 0) launch.grid.indirect = launch.buffers[static_cast<std::size_t>(call.indirect)].buffer;
  const auto buffers = launch.buffers;
  Program program;
  program.groups.push_back({"only", {launch}});
  device->prepare(program);
  std::string error;
  try {
    device->run(program);
  } catch (const DeviceError& failed) {
    error = failed.what();
  }
  for (std::uint32_t i = 0; i < call.n_buffers; ++i) device->read(buffers[i].buffer, 0, call.data[i], call.bytes[i]);
  if (!error.empty()) throw DeviceError(error);
}

}  // namespace

// Returns "" or "DeviceError: ..." or "invalid_argument: ...".
extern "C" const char* run_case(const Call* call) {
  static thread_local std::string text;
  text.clear();
  try {
    launch(*call);
  } catch (const expertile::DeviceError& error) {
    text = std::string("DeviceError: ") + error.what();
  } catch (const std::invalid_argument& error) {
    text = std::string("invalid_argument: ") + error.what();
  } catch (const std::exception& error) {
    text = std::string("exception: ") + error.what();
  }
  return text.c_str();
}
