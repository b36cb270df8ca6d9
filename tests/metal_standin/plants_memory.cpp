// plants_memory.cpp: misuses of buffers, pointers and reference counts, each one lambda.
#include <sys/mman.h>

#include <array>
#include <cstring>

#include "rig.h"

namespace standin {
namespace {

// gemm_grouped on one expert whose weights lie at `address`; no tiles, so that nothing is read.
void run_grouped(Rig& rig, std::uint64_t address, const MTL::Buffer* resident) {
  rig.clear = rig.pipeline("gemm.metal", "gemm_grouped_q8_0_16_64_32_2");
  rig.threads = {64, 1, 1};
  const auto rows = rig.buffer(64), table = rig.buffer(8), scale = rig.buffer(4), tiles = rig.buffer(16),
             meta = rig.buffer(56), y = rig.buffer(64);
  std::memcpy(table->contents(), &address, 8);
  std::memset(meta->contents(), 0, 56);
  rig.encode();
  if (resident != nullptr) rig.encoder->useResource(resident, MTL::ResourceUsageRead);
  const expertile::args::GemmArgs args{};
  rig.encoder->setBytes(&args, sizeof(args), 0);
  const std::array<MTL::Buffer*, 6> buffers{rows.get(), table.get(), scale.get(), tiles.get(), meta.get(), y.get()};
  for (std::size_t i = 0; i < buffers.size(); ++i) rig.encoder->setBuffer(buffers[i], 0, i + 1);
  rig.encoder->dispatchThreadgroups(MTL::Size(1, 1, 1), rig.threads);
  rig.finish();
}

}  // namespace

Plants memory_plants() {
  return {
      {"no bytes", [] { Rig().buffer(0); }},
      {"beyond maxBufferLength", [] { Rig().buffer(1ull << 40); }},
      {"private storage", [] { Rig().device->newBuffer(64, MTL::ResourceStorageModePrivate); }},
      {"no copy of a pointer inside a page",
       [] {
         alignas(16) static char memory[65536];
         Rig().device->newBuffer(memory + 16, 16384, kShared, nullptr);
       }},
      {"no copy of part of a page",
       [] {
         Rig rig;
         void* memory = ::mmap(nullptr, 65536, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
         rig.device->newBuffer(memory, 100, kShared, nullptr);
       }},
      {"no copy of memory that is not there",
       [] {
         Rig rig;
         void* memory = ::mmap(nullptr, 65536, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
         ::munmap(memory, 65536);
         rig.device->newBuffer(memory, 65536, kShared, nullptr);
       }},
      {"write into read-only memory",
       [] {
         Rig rig;
         void* memory = ::mmap(nullptr, 65536, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
         rig.rows = NS::TransferPtr(rig.device->newBuffer(memory, 65536, kShared, nullptr));
         rig.encode();
         rig.dispatch();
       }},
      {"pointer to a resident buffer",
       [] {
         Rig rig;
         const auto weights = rig.buffer(64);
         run_grouped(rig, weights->gpuAddress(), weights.get());
       }},
      {"pointer to a buffer that is not resident",
       [] {
         Rig rig;
         const auto weights = rig.buffer(64);
         run_grouped(rig, weights->gpuAddress(), nullptr);
       }},
      {"host pointer for a GPU address",
       [] {
         Rig rig;
         const auto weights = rig.buffer(64);
         run_grouped(rig, reinterpret_cast<std::uint64_t>(weights->contents()), weights.get());
       }},
      {"leaked buffer",
       [] {
         Rig rig;
         rig.device->newBuffer(64, kShared);
       }},
      {"autorelease without a pool",
       [] {
         const auto device = NS::TransferPtr(MTL::CreateSystemDefaultDevice());
         device->name();
       }},
      {"release too many",
       [] {
         Rig rig;
         MTL::Buffer* buffer = rig.device->newBuffer(64, kShared);
         buffer->release();
         buffer->release();
       }},
      {"message to a freed object",
       [] {
         Rig rig;
         MTL::Buffer* buffer = rig.device->newBuffer(64, kShared);
         buffer->release();
         buffer->contents();
       }},
      {"message to nil",
       [] {
         Rig rig;
         MTL::Buffer* none = nullptr;
         rig.device->name();
         none->length();
       }},
      {"unknown selector",
       [] {
         Rig rig;
         rig.device->newHeap(nullptr);
       }},
  };
}

}  // namespace standin
