// gguf.cpp: reads the header of GGUF files and maps their data.
//
// A file is untrusted: every count, length, dimension and offset is held against the bytes that are left in the file
// before anything is allocated or touched, in arithmetic that cannot wrap (all values compared are below 2^63).
// What this cannot guard against is a file that is cut short while it is mapped: the system then raises SIGBUS on the
// lost pages. Files of models are replaced by renaming, which leaves a mapping intact.
#include "expertile/gguf.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <memory>
#include <optional>
#include <set>
#include <string_view>

#include "expertile/error.h"
#include "gguf_reader.h"
#include "gguf_value.h"

namespace expertile {

namespace {

constexpr std::uint32_t kMagic = 0x46554747;                      // "GGUF" as a little-endian word
constexpr std::uint64_t kMinKeyValueBytes = 8 + 1 + 4 + 1;        // length, name, type, value
constexpr std::uint64_t kMinTensorBytes = 8 + 1 + 4 + 8 + 4 + 8;  // length, name, n_dims, dimension, type, offset
constexpr std::uint64_t kDefaultAlignment = 32, kMinAlignment = 8, kMaxAlignment = std::uint64_t{1} << 31;
constexpr std::uint32_t kMaxDimensions = 4;

// One tensor as the header tells it.
struct TensorEntry {
  std::string name;
  std::vector<std::uint64_t> shape;
  std::uint32_t type = 0;
  std::uint64_t offset = 0;  // in the data section
  std::uint64_t bytes = 0;   // 0 = unknown, for a type that the engine does not know
};

// One file of a model.
struct Shard {
  std::string path;
  std::shared_ptr<Mapping> mapping;
  std::map<std::string, GGUFValue> metadata;
  std::vector<TensorEntry> entries;
  std::uint64_t data_start = 0;

  [[noreturn]] void fail(const std::string& field, const std::string& expected, const std::string& got) const {
    throw GGUFError(expected_got(path + ": " + field, expected, got));
  }
  std::optional<std::uint64_t> number(const std::string& key) const {
    const auto found = metadata.find(key);
    if (found == metadata.end()) return std::nullopt;
    const auto value = as_unsigned(found->second);
    if (!value) fail(key, "a whole number from 0", describe(found->second));
    return value;
  }
};

void read_metadata(Reader& reader, std::uint64_t count, Shard& shard) {
  for (std::uint64_t i = 0; i < count; ++i) {
    reader.context = "metadata entry " + std::to_string(i);
    reader.charge("key", 256);
    std::string key = reader.read_name("key length");
    reader.context = key;
    if (shard.metadata.contains(key)) reader.fail("key", "every key once", "a second one");
    GGUFValue value = read_value(reader);
    shard.metadata.emplace(std::move(key), std::move(value));
  }
}

TensorEntry read_tensor_entry(Reader& reader, const std::string& path) {
  TensorEntry entry;
  reader.charge("name", 512);  // of the entry, and of the Tensor that it becomes
  entry.name = reader.read_name("name length");
  reader.context = entry.name;
  const auto n_dims = reader.read<std::uint32_t>("n_dims");
  if (n_dims < 1 || n_dims > kMaxDimensions) reader.fail("n_dims", "1 to 4", n_dims);
  entry.shape.resize(n_dims);
  for (std::uint64_t& dimension : entry.shape) {
    dimension = reader.read<std::uint64_t>("dimension");
    const auto index = std::to_string(&dimension - entry.shape.data());
    if (dimension == 0) reader.fail(("dimension " + index).c_str(), "at least 1", 0);
  }
  entry.type = reader.read<std::uint32_t>("type");
  entry.offset = reader.read<std::uint64_t>("offset");
  try {
    const TypeInfo* info = find_type(entry.type);
    if (info != nullptr) {
      entry.bytes = tensor_bytes(info->type, entry.shape, path + ": " + entry.name + " shape");
    } else {
      tensor_bytes(Type::F32, entry.shape, path + ": " + entry.name + " shape");  // its dimensions at least
    }
  } catch (const std::invalid_argument& error) {
    throw GGUFError(error.what());
  }
  return entry;
}

void read_tensor_entries(Reader& reader, std::uint64_t count, Shard& shard) {
  std::set<std::string_view> names;
  reader.charge("tensor_count", count * sizeof(TensorEntry));
  shard.entries.reserve(count);  // the views in `names` point into it
  for (std::uint64_t i = 0; i < count; ++i) {
    reader.context = "tensor " + std::to_string(i);
    shard.entries.push_back(read_tensor_entry(reader, shard.path));
    if (!names.insert(shard.entries.back().name).second) reader.fail("name", "every tensor once", "a second one");
  }
}

// Where the data begins, once the offsets have been checked by themselves.
void place_data(const Reader& reader, Shard& shard) {
  const std::uint64_t alignment = shard.number("general.alignment").value_or(kDefaultAlignment);
  if (!std::has_single_bit(alignment) || alignment < kMinAlignment || alignment > kMaxAlignment) {
    shard.fail("general.alignment", "a power of two from 8 to 2^31", std::to_string(alignment));
  }
  const std::uint64_t size = shard.mapping->size();
  shard.data_start = (reader.position() + alignment - 1) / alignment * alignment;
  if (shard.entries.empty() && size > shard.data_start) {
    shard.fail("tensor_count", "tensors for the last " + std::to_string(size - shard.data_start) + " bytes of the file",
               "0");
  }
  for (const TensorEntry& entry : shard.entries) {
    if (entry.offset % alignment != 0) {
      shard.fail(entry.name + " offset", "a multiple of " + std::to_string(alignment), std::to_string(entry.offset));
    }
    if (shard.data_start >= size || entry.offset >= size - shard.data_start) {
      const std::uint64_t data_bytes = size > shard.data_start ? size - shard.data_start : 0;
      shard.fail(entry.name + " offset", "an offset inside the " + std::to_string(data_bytes) + " bytes of data",
                 std::to_string(entry.offset));
    }
  }
}

// A fork stores 128 weights in 34 bytes under Q2_0's number. The file holds no sizes: the room up to the next tensor
// tells the two apart, except where both pad to the same size (tensors of less than about 2,048 weights).
void refuse_other_q2_0(const Shard& shard, const TensorEntry& entry, std::uint64_t room) {
  if (entry.type != static_cast<std::uint32_t>(Type::Q2_0) || room >= entry.bytes || entry.shape[0] % 128 != 0) return;
  const std::uint64_t other = entry.bytes / (2 * 18) * 34;
  if (room < other) return;  // fits neither: the general checks name the fault
  shard.fail(entry.name + " (type Q2_0)", std::to_string(entry.bytes) + " bytes of data (18 bytes for 64 weights)",
             "room for " + std::to_string(room) + ", the size of another format (34 bytes for 128 weights)");
}

void check_data(const Shard& shard) {
  std::vector<const TensorEntry*> order;
  order.reserve(shard.entries.size());
  for (const TensorEntry& entry : shard.entries) order.push_back(&entry);
  std::sort(order.begin(), order.end(),
            [](auto* a, auto* b) { return a->offset != b->offset ? a->offset < b->offset : a < b; });
  const std::uint64_t data_bytes = shard.mapping->size() - shard.data_start;
  for (std::size_t i = 0; i < order.size(); ++i) {
    const TensorEntry& entry = *order[i];
    const TensorEntry* next = i + 1 < order.size() ? order[i + 1] : nullptr;
    // The data of an unknown type has at least one byte; how many is not known.
    const std::uint64_t bytes = std::max<std::uint64_t>(entry.bytes, 1);
    const std::uint64_t room = (next != nullptr ? next->offset : data_bytes) - entry.offset;
    refuse_other_q2_0(shard, entry, room);
    const std::string got = std::to_string(bytes) + " bytes of shape " + describe(entry.shape) + " at offset " +
                            std::to_string(entry.offset);
    if (bytes > data_bytes - entry.offset) {
      shard.fail(entry.name + " shape and offset",
                 "data inside the file's " + std::to_string(data_bytes) + " bytes of data", got);
    }
    if (bytes > room) {
      shard.fail(entry.name + " shape and offset",
                 "data that ends before that of " + next->name + " at offset " + std::to_string(next->offset),
                 "an overlap: " + got);
    }
  }
}

void read_header(Reader& reader) {
  const auto magic = reader.read<std::uint32_t>("magic");
  if (magic == __builtin_bswap32(kMagic)) reader.fail("magic", "a little-endian file", "a big-endian one");
  if (magic != kMagic) reader.fail("magic", "a GGUF file", "other bytes at its start");
  const auto version = reader.read<std::uint32_t>("version");
  if (version == 2 || version == 3) return;
  const std::uint32_t swapped = __builtin_bswap32(version);
  if (swapped >= 1 && swapped <= 255) reader.fail("version", "a little-endian file", "a big-endian one");
  reader.fail("version", "2 or 3", version);
}

Shard read_shard(const std::string& path, const std::string& what) {
  Shard shard;
  shard.path = path;
  shard.mapping = std::make_shared<Mapping>(path, what);
  Reader reader(path, *shard.mapping);
  read_header(reader);
  const std::uint64_t n_tensors = reader.read_count("tensor_count", kMinTensorBytes);
  const std::uint64_t n_entries = reader.read_count("metadata_kv_count", kMinKeyValueBytes);
  read_metadata(reader, n_entries, shard);
  read_tensor_entries(reader, n_tensors, shard);
  place_data(reader, shard);
  if (!shard.entries.empty()) check_data(shard);
  return shard;
}

// "NAME-00002-of-00003.gguf"
struct ShardName {
  std::string prefix;
  std::uint64_t number = 0, count = 0;

  static std::optional<ShardName> parse(const std::string& path) {
    constexpr std::string_view shape = "-ddddd-of-ddddd.gguf";
    if (path.size() < shape.size()) return std::nullopt;
    const std::string tail = path.substr(path.size() - shape.size());
    for (std::size_t i = 0; i < shape.size(); ++i) {
      const bool digit = tail[i] >= '0' && tail[i] <= '9';
      if (shape[i] == 'd' ? !digit : tail[i] != shape[i]) return std::nullopt;
    }
    return ShardName{path.substr(0, path.size() - shape.size()), std::stoul(tail.substr(1, 5)),
                     std::stoul(tail.substr(10, 5))};
  }
  std::string path(std::uint64_t which) const {
    char tail[32];
    std::snprintf(tail, sizeof(tail), "-%05u-of-%05u.gguf", static_cast<unsigned>(which), static_cast<unsigned>(count));
    return prefix + tail;
  }
};

void add_shard(const Shard& shard, GGUFFile& file) {
  file.paths.push_back(shard.path);
  for (const TensorEntry& entry : shard.entries) {
    if (file.tensors.contains(entry.name) || file.unknown_types.contains(entry.name)) {
      shard.fail(entry.name + " name", "every tensor once", "a second one, in another shard");
    }
    const TypeInfo* info = find_type(entry.type);
    if (info == nullptr) {
      file.unknown_types.emplace(entry.name, entry.type);
      continue;
    }
    const std::uint64_t offset = shard.data_start + entry.offset;
    file.tensors.emplace(entry.name, Tensor{entry.name, info->type, entry.shape, shard.mapping->data() + offset,
                                            entry.bytes, shard.mapping, shard.path, offset});
  }
}

// A shard's own words about the split must agree with its file name.
void check_split(const Shard& shard, const ShardName& name, std::uint64_t number) {
  const auto count = shard.number("split.count"), position = shard.number("split.no");
  const auto text = [](const std::optional<std::uint64_t>& value) { return value ? std::to_string(*value) : "none"; };
  if (count != name.count)
    shard.fail("split.count", std::to_string(name.count) + ", as the file's name says", text(count));
  if (position != number - 1) {
    shard.fail("split.no", std::to_string(number - 1) + ", as the file's name says", text(position));
  }
}

void check_tensor_total(const Shard& shard, const GGUFFile& file) {
  const std::uint64_t total = file.tensors.size() + file.unknown_types.size();
  const auto stated = shard.number("split.tensors.count");
  if (stated && *stated != total) {
    shard.fail("split.tensors.count", std::to_string(total) + ", the tensors that the shards hold",
               std::to_string(*stated));
  }
}

}  // namespace

GGUFFile read_gguf(const std::string& path) {
  Shard opened = read_shard(path, "a readable file");
  const std::uint64_t count = opened.number("split.count").value_or(1);
  if (count == 0) opened.fail("split.count", "at least 1", "0");
  const std::optional<ShardName> name = ShardName::parse(path);
  GGUFFile file;
  if (count == 1 && (!name || name->count <= 1)) {
    add_shard(opened, file);
    check_tensor_total(opened, file);
    file.metadata = std::move(opened.metadata);
    return file;
  }
  if (!name) {
    opened.fail("split.count", "a file name that ends in -NNNNN-of-NNNNN.gguf for a shard",
                std::to_string(count) + " shards under another name");
  }
  if (name->number < 1 || name->number > name->count) {
    opened.fail("file name", "a shard from 1 to " + std::to_string(name->count), std::to_string(name->number));
  }
  check_split(opened, *name, name->number);
  std::vector<Shard> shards;
  for (std::uint64_t number = 1; number <= name->count; ++number) {
    const std::string what = "shard " + std::to_string(number) + " of " + std::to_string(name->count);
    shards.push_back(number == name->number ? std::move(opened) : read_shard(name->path(number), what));
    check_split(shards.back(), *name, number);
    add_shard(shards.back(), file);
  }
  for (const Shard& shard : shards) check_tensor_total(shard, file);
  file.metadata = std::move(shards.front().metadata);
  return file;
}

}  // namespace expertile
