#include "devices/cuda/align_peer.h"

#include <string>

#include "expertile/error.h"
#include "expertile/program.h"

namespace expertile {

AlignPeer time_align_peer(Device& device, const std::int32_t* ids, const args::PlanArgs& args, std::uint32_t layers,
                          std::uint32_t repeats) {
  if (std::string(device.kind()) != "cuda") {
    throw std::invalid_argument(expected_got("time_align_peer", "a cuda device", device.kind()));
  }
  const std::uint64_t entries = args.n_entries, rows = args.max_rows;
  const auto make = [&](const char* name, std::uint64_t words, Access access) {
    return Binding{device.alloc(words * 4), access, 0, words * 4, name};
  };
  const Binding id_list = make("ids", entries, Access::Read);
  const Binding next = make("next", args.n_experts, Access::ReadWrite);
  const Binding tile_expert = make("tile_expert", rows / args.tile_rows, Access::Write);
  const Binding row_entry = make("row_entry", rows, Access::ReadWrite);
  const Binding n_rows = make("n_rows", 1, Access::Write);
  device.write(id_list.buffer, 0, ids, entries * 4);

  Launch count, sort;
  count.kernel = "align_count";
  count.buffers = {id_list, next, tile_expert, row_entry, n_rows};
  count.grid.size = {2, 1, 1};
  sort.kernel = "align_sort";
  sort.buffers = {id_list, next, row_entry};
  sort.grid.size = {static_cast<std::uint32_t>((entries + 255) / 256), 1, 1};
  count.args = sort.args = pack_args(args);

  Program program;
  program.name = "align_peer";
  for (std::uint32_t i = 0; i < layers; ++i) {
    program.groups.push_back({"count", {count}});
    program.groups.push_back({"sort", {sort}});
  }
  AlignPeer peer;
  device.prepare(program);
  device.run(program);
  for (std::uint32_t i = 0; i < repeats; ++i) peer.seconds.push_back(device.run(program) / layers);
  std::uint32_t used = 0;
  device.read(n_rows.buffer, 0, &used, 4);
  peer.row_entry.resize(used);
  if (used > 0) device.read(row_entry.buffer, 0, peer.row_entry.data(), std::uint64_t{used} * 4);
  return peer;
}

}  // namespace expertile
