#include "serve.h"

#include <Metal/Metal.hpp>

#include "args.h"
#include "devices/metal/context.h"
#include "expertile/error.h"
#include "expertile/metal.h"
#include "expertile/program.h"
#include "runtime.h"

namespace standin {
namespace {

using expertile::BufferRef;

expertile::Launch clear(const BufferRef& rows, const BufferRef& weights) {
  expertile::args::PlanArgs args{};
  args.max_rows = static_cast<std::uint32_t>(rows->bytes() / 4);
  expertile::Launch launch;
  launch.kernel = "mm_clear";
  launch.args = expertile::pack_args(args);
  launch.buffers = {{rows, expertile::Access::Write, 0, rows->bytes(), "row_token"},
                    {weights, expertile::Access::Write, 0, weights->bytes(), "row_weight"}};
  launch.grid.size = {(args.max_rows + 255) / 256, 1, 1};
  return launch;
}

template <class Call>
void expect_refusal(const char* what, const Call& call) {
  try {
    call();
  } catch (const std::invalid_argument&) {
    return;
  }
  fault(std::string(what) + " was not refused");
}

}  // namespace

void serve() {
  const expertile::metal::Pool pool;
  const auto gpu = NS::TransferPtr(MTL::CreateSystemDefaultDevice());
  const auto queue = NS::TransferPtr(gpu->newCommandQueue());
  const auto memory = NS::TransferPtr(gpu->newBuffer(4096, MTL::ResourceStorageModeShared));
  auto* words = static_cast<std::int32_t*>(memory->contents());
  for (int i = 0; i < 1024; ++i) words[i] = 7;
  {
    const auto device = expertile::open_metal_device({gpu.get(), queue.get(), ""});
    const BufferRef rows = expertile::metal_buffer(*device, memory.get(), 1024, 1024);
    const BufferRef weights = expertile::metal_buffer(*device, memory.get(), 2048, 1024);
    if (expertile::metal_handle(weights).buffer != memory.get() || expertile::metal_handle(weights).offset != 2048) {
      fault("metal_handle gives another place");
    }
    expect_refusal("an offset of 8", [&] { expertile::metal_buffer(*device, memory.get(), 8, 16); });
    expect_refusal("a range beyond the end", [&] { expertile::metal_buffer(*device, memory.get(), 4080, 32); });
    const auto other = expertile::open_metal_device({});
    expertile::Program program;
    program.groups = {{"clear", {clear(rows, other->alloc(1024))}}};
    expect_refusal("another device's buffer", [&] { device->prepare(program); });
    program.groups = {{"clear", {clear(rows, device->alloc(1024))}}};
    device->prepare(program);
    device->run(program);
  }
  for (int i = 0; i < 1024; ++i) {
    if (words[i] != (i >= 256 && i < 512 ? -1 : 7)) fault("a server's buffer holds something else");
  }
}

void run_clear_twice(expertile::Device& device, bool one_group) {
  const BufferRef rows = device.alloc(1200), weights = device.alloc(1200);
  const expertile::Launch launch = clear(rows, weights);
  expertile::Program program;
  if (one_group) {
    program.groups = {{"both", {launch, launch}}};
  } else {
    program.groups = {{"first", {launch}}, {"second", {launch}}};
  }
  device.prepare(program);
  device.run(program);
}

}  // namespace standin
