// gguf_reader.cpp: maps a file, and decodes names and metadata values.
#include "gguf_reader.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <vector>

namespace expertile {

static_assert(sizeof(std::size_t) == 8, "files are mapped whole: a 64-bit address space is needed");
static_assert(std::endian::native == std::endian::little, "values are read as they lie in the file");

namespace {

constexpr std::uint64_t kMaxNameBytes = 65535;
#if defined(__APPLE__)
constexpr int kMapping = MAP_SHARED;  // what Metal is known to take as a buffer without a copy
#else
constexpr int kMapping = MAP_PRIVATE;
#endif
constexpr std::uint64_t kReadAheadBytes = std::uint64_t{16} << 20;  // most headers are below this
constexpr std::uint64_t kMinMetadataBudget = std::uint64_t{64} << 20;

// The numbers of metadata types in the file.
enum ValueType : std::uint32_t { kU8, kI8, kU16, kI16, kU32, kI32, kF32, kBool, kString, kArray, kU64, kI64, kF64 };

bool read_bool(Reader& reader, const char* part) {
  const auto byte = reader.read<std::uint8_t>(part);
  if (byte > 1) reader.fail(part, "0 or 1 for a bool", unsigned{byte});
  return byte != 0;
}

template <class Stored, class Decoded>
GGUFArray read_numbers(Reader& reader) {
  const std::uint64_t count = reader.read_count("array length", sizeof(Stored));
  reader.charge("array length", count * sizeof(Decoded));
  std::vector<Decoded> values(count);
  for (Decoded& value : values) value = static_cast<Decoded>(reader.read<Stored>("array element"));
  return values;
}

GGUFArray read_bools(Reader& reader) {
  const std::uint64_t count = reader.read_count("array length", 1);
  reader.charge("array length", count / 8 + 8);
  std::vector<bool> values(count);
  for (std::uint64_t i = 0; i < count; ++i) values[i] = read_bool(reader, "array element");
  return values;
}

GGUFArray read_strings(Reader& reader) {
  const std::uint64_t count = reader.read_count("array length", sizeof(std::uint64_t));
  reader.charge("array length", count * sizeof(std::string));
  std::vector<std::string> values(count);
  for (std::string& value : values) value = reader.read_string("array element length");
  return values;
}

GGUFArray read_array(Reader& reader) {
  const auto type = reader.read<std::uint32_t>("array element type");
  switch (type) {
    case kU8:
      return read_numbers<std::uint8_t, std::uint64_t>(reader);
    case kI8:
      return read_numbers<std::int8_t, std::int64_t>(reader);
    case kU16:
      return read_numbers<std::uint16_t, std::uint64_t>(reader);
    case kI16:
      return read_numbers<std::int16_t, std::int64_t>(reader);
    case kU32:
      return read_numbers<std::uint32_t, std::uint64_t>(reader);
    case kI32:
      return read_numbers<std::int32_t, std::int64_t>(reader);
    case kF32:
      return read_numbers<float, double>(reader);
    case kU64:
      return read_numbers<std::uint64_t, std::uint64_t>(reader);
    case kI64:
      return read_numbers<std::int64_t, std::int64_t>(reader);
    case kF64:
      return read_numbers<double, double>(reader);
    case kBool:
      return read_bools(reader);
    case kString:
      return read_strings(reader);
    case kArray:
      reader.fail("array element type", "a plain type", "arrays within an array");
    default:
      reader.fail("array element type", "a type number of 0 to 12", type);
  }
}

}  // namespace

Mapping::Mapping(const std::string& path, const std::string& what) {
  const std::string where = path + ": file";
  if (path.find('\0') != std::string::npos) throw GGUFError(expected_got(where, "a path without a zero byte", "one"));
  // O_NONBLOCK: a named pipe must be refused below, not waited for.
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) throw GGUFError(expected_got(where, what, std::strerror(errno)));
  struct stat status{};
  void* address = nullptr;
  std::string problem;
  if (::fstat(file, &status) != 0) {
    problem = std::strerror(errno);
  } else if (!S_ISREG(status.st_mode)) {
    problem = S_ISDIR(status.st_mode) ? "a directory" : "something other than a regular file";
  } else if (status.st_size > 0) {
    address = ::mmap(nullptr, static_cast<std::size_t>(status.st_size), PROT_READ, kMapping, file, 0);
    if (address == MAP_FAILED) problem = std::string("a failing mmap: ") + std::strerror(errno);
  }
  ::close(file);
  if (!problem.empty()) throw GGUFError(expected_got(where, what, problem));
  size_ = static_cast<std::uint64_t>(status.st_size);
  data_ = static_cast<const std::byte*>(address);
  // Only the header is asked for ahead: expert weights may exceed memory, and are read as they are chosen.
  if (size_ > 0) ::posix_madvise(address, std::min(size_, kReadAheadBytes), POSIX_MADV_WILLNEED);
}

Mapping::~Mapping() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

Reader::Reader(const std::string& path, const Mapping& mapping)
    : path_(path), data_(mapping.data()), size_(mapping.size()), budget_(std::max(size_, kMinMetadataBudget)) {}

std::string Reader::read_string(const char* part) {
  const std::uint64_t length = read_count(part, 1);
  charge(part, length + sizeof(std::string));
  std::string text(reinterpret_cast<const char*>(data_ + position_), length);
  position_ += length;
  return text;
}

std::string Reader::read_name(const char* part) {
  std::string name = read_string(part);
  if (name.empty() || name.size() > kMaxNameBytes) {
    fail(part, "1 to " + std::to_string(kMaxNameBytes) + " bytes", name.size());
  }
  if (!std::all_of(name.begin(), name.end(), [](char c) { return c >= 0x20 && c < 0x7f; })) {
    fail(part, "a name of printable ASCII characters", "other bytes");
  }
  return name;
}

GGUFValue read_value(Reader& reader) {
  const auto type = reader.read<std::uint32_t>("value type");
  switch (type) {
    case kU8:
      return std::uint64_t{reader.read<std::uint8_t>("value")};
    case kI8:
      return std::int64_t{reader.read<std::int8_t>("value")};
    case kU16:
      return std::uint64_t{reader.read<std::uint16_t>("value")};
    case kI16:
      return std::int64_t{reader.read<std::int16_t>("value")};
    case kU32:
      return std::uint64_t{reader.read<std::uint32_t>("value")};
    case kI32:
      return std::int64_t{reader.read<std::int32_t>("value")};
    case kF32:
      return double{reader.read<float>("value")};
    case kU64:
      return reader.read<std::uint64_t>("value");
    case kI64:
      return reader.read<std::int64_t>("value");
    case kF64:
      return reader.read<double>("value");
    case kBool:
      return read_bool(reader, "value");
    case kString:
      return reader.read_string("value length");
    case kArray:
      return read_array(reader);
    default:
      reader.fail("value type", "a type number of 0 to 12", type);
  }
}

}  // namespace expertile
