// gguf_reader.h: the mapped file, and the walk over its header. Internal to gguf*.cpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

#include "expertile/error.h"
#include "expertile/gguf.h"

namespace expertile {

// A whole file, mapped read-only. Unmapped with the last tensor that points into it.
class Mapping {
 public:
  // `what` completes "expected ..." where the file cannot be opened.
  Mapping(const std::string& path, const std::string& what);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  const std::byte* data() const { return data_; }
  std::uint64_t size() const { return size_; }

 private:
  const std::byte* data_ = nullptr;
  std::uint64_t size_ = 0;
};

// Walks over a header. `context` names the entry that is being read, for messages.
class Reader {
 public:
  Reader(const std::string& path, const Mapping& mapping);

  std::string context;

  std::uint64_t position() const { return position_; }
  std::uint64_t left() const { return size_ - position_; }

  template <class Got>
  [[noreturn]] void fail(const char* part, const std::string& expected, const Got& got) const {
    throw GGUFError(expected_got(path_ + ": " + context + (context.empty() ? "" : " ") + part, expected, got));
  }

  template <class T>
  T read(const char* part) {
    if (left() < sizeof(T)) {
      fail(part, std::to_string(sizeof(T)) + " bytes at byte " + std::to_string(position_),
           "the end of the file after " + std::to_string(left()));
    }
    T value;
    std::memcpy(&value, data_ + position_, sizeof(T));
    position_ += sizeof(T);
    return value;
  }

  // A count of things of at least `item_bytes` each, which must fit in the rest of the file.
  std::uint64_t read_count(const char* part, std::uint64_t item_bytes) {
    const auto count = read<std::uint64_t>(part);
    if (count > left() / item_bytes) {
      fail(part, "at most " + std::to_string(left() / item_bytes) + ", as the rest of the file holds", count);
    }
    return count;
  }

  std::string read_string(const char* part);
  // Names are ASCII in every writer, and end up in messages.
  std::string read_name(const char* part);

  // Small values grow when decoded (a byte becomes a word of eight): a bound on the sum, kept before allocating.
  void charge(const char* part, std::uint64_t bytes) {
    if (bytes > budget_) fail(part, "metadata that decodes within the size of the file", "more");
    budget_ -= bytes;
  }

 private:
  std::string path_;
  const std::byte* data_;
  std::uint64_t size_;
  std::uint64_t position_ = 0;
  std::uint64_t budget_;
};

// A metadata value with its type, arrays included.
GGUFValue read_value(Reader& reader);

}  // namespace expertile
