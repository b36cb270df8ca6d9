#include "expertile/program.h"

#include <algorithm>
#include <map>
#include <stdexcept>

#include "expertile/error.h"

namespace expertile {

const char* precision_name(Precision precision) { return precision == Precision::Exact ? "exact" : "bf16"; }

Precision precision_from_name(const std::string& name) {
  for (const Precision precision : {Precision::Exact, Precision::Bf16}) {
    if (name == precision_name(precision)) return precision;
  }
  throw std::invalid_argument(expected_got("precision", "exact or bf16", name));
}

namespace {

struct Use {
  const Buffer* buffer;
  std::uint64_t begin;
  std::uint64_t end;
  bool reads;
  bool writes;
  const std::string* name;
  const Launch* launch;
};

bool overlap(const Use& a, const Use& b) { return a.buffer == b.buffer && a.begin < b.end && b.begin < a.end; }
bool conflict(const Use& a, const Use& b) { return overlap(a, b) && (a.writes || b.writes); }

std::vector<Use> uses_of(const Group& group) {
  std::vector<Use> uses;
  for (const Launch& launch : group.launches) {
    for (const Binding& b : launch.buffers) {
      uses.push_back({b.buffer.get(), b.offset, b.offset + b.bytes, b.access != Access::Write, b.access != Access::Read,
                      &b.name, &launch});
    }
    if (launch.grid.indirect) {
      static const std::string grid_name = "indirect grid";
      const std::uint64_t at = launch.grid.indirect_offset;
      uses.push_back({launch.grid.indirect.get(), at, at + 12, true, false, &grid_name, &launch});
    }
  }
  return uses;
}

std::string place(const Group& group, const Launch& launch) { return group.name + "/" + launch.kernel; }

// What the program has written so far: disjoint, sorted byte ranges of each buffer.
class Written {
 public:
  void add(const Buffer* buffer, std::uint64_t begin, std::uint64_t end) {
    auto& ranges = ranges_[buffer];
    auto it = ranges.upper_bound(begin);
    if (it != ranges.begin() && std::prev(it)->second >= begin) it = std::prev(it);
    while (it != ranges.end() && it->first <= end) {
      begin = std::min(begin, it->first);
      end = std::max(end, it->second);
      it = ranges.erase(it);
    }
    ranges[begin] = end;
  }
  bool covers(const Buffer* buffer, std::uint64_t begin, std::uint64_t end) const {
    const auto found = ranges_.find(buffer);
    if (found == ranges_.end()) return false;
    auto it = found->second.upper_bound(begin);
    return it != found->second.begin() && std::prev(it)->second >= end;
  }

 private:
  std::map<const Buffer*, std::map<std::uint64_t, std::uint64_t>> ranges_;
};

bool within(const Buffer& buffer, std::uint64_t offset, std::uint64_t bytes) {
  return bytes <= buffer.bytes() && offset <= buffer.bytes() - bytes;
}

void check_contract(const Group& group, const Launch& launch, std::vector<Fault>& faults) {
  const std::string where = place(group, launch);
  const auto fault = [&](const std::string& detail) { faults.push_back({"contract", where, detail}); };
  const KernelInfo* info = find_kernel(launch.kernel);
  if (!info) return fault("no kernel has this name");
  if (launch.args.size() != info->args_bytes) {
    fault("args: expected " + std::to_string(info->args_bytes) + " bytes, got " + std::to_string(launch.args.size()));
  }
  if (launch.buffers.size() != info->buffers.size()) {
    return fault("buffers: expected " + std::to_string(info->buffers.size()) + ", got " +
                 std::to_string(launch.buffers.size()));
  }
  for (std::size_t i = 0; i < launch.buffers.size(); ++i) {
    const Binding& b = launch.buffers[i];
    const bool reads_only = b.access == Access::Read;
    if (reads_only != info->buffers[i].is_const) {
      fault(std::string("buffer ") + info->buffers[i].name + ": expected " +
            (info->buffers[i].is_const ? "Read (it is const)" : "Write or ReadWrite") + ", got " +
            (reads_only ? "Read" : "a write"));
    }
    if (!b.buffer || b.bytes == 0 || !within(*b.buffer, b.offset, b.bytes)) {
      fault(std::string("buffer ") + info->buffers[i].name + ": byte range outside its buffer");
    }
  }
  if (launch.grid.indirect && !within(*launch.grid.indirect, launch.grid.indirect_offset, 12)) {
    fault("indirect grid: three words outside its buffer");
  }
  for (const std::uint32_t size : launch.grid.indirect ? launch.grid.max_grid : launch.grid.size) {
    if (size == 0) fault("grid: expected at least 1 in every dimension, got 0");
  }
}

void check_hazards(const Group& group, const std::vector<Use>& uses, std::vector<Fault>& faults) {
  for (std::size_t i = 0; i < uses.size(); ++i) {
    for (std::size_t j = i + 1; j < uses.size(); ++j) {
      const Use &a = uses[i], &b = uses[j];
      if (!conflict(a, b)) continue;
      const std::string kind = a.writes && b.writes ? "write-write" : "read-write";
      faults.push_back({"hazard", place(group, *a.launch),
                        kind + " on " + *a.name + " with " + b.launch->kernel + " (" + *b.name + ")"});
    }
  }
}

}  // namespace

std::vector<Fault> check_program(const Program& program) {
  std::vector<Fault> faults;
  Written written;
  for (const Binding& b : program.inputs) written.add(b.buffer.get(), b.offset, b.offset + b.bytes);
  std::vector<Use> before;
  for (std::size_t g = 0; g < program.groups.size(); ++g) {
    const Group& group = program.groups[g];
    for (const Launch& launch : group.launches) check_contract(group, launch, faults);
    std::vector<Use> uses = uses_of(group);
    check_hazards(group, uses, faults);
    for (const Use& use : uses) {
      if (use.reads && !written.covers(use.buffer, use.begin, use.end)) {
        faults.push_back({"unwritten", place(group, *use.launch), *use.name + " is read before it is written"});
      }
    }
    if (g > 0) {
      const bool needed = std::any_of(uses.begin(), uses.end(), [&](const Use& use) {
        return std::any_of(before.begin(), before.end(), [&](const Use& other) { return conflict(use, other); });
      });
      if (!needed) {
        faults.push_back({"barrier", program.groups[g - 1].name + " | " + group.name, "no hazard needs this barrier"});
      }
    }
    for (const Use& use : uses) {
      if (use.writes) written.add(use.buffer, use.begin, use.end);
    }
    before = std::move(uses);
  }
  return faults;
}

}  // namespace expertile
