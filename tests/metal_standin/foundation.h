// foundation.h: the Foundation objects that metal-cpp hands in and gets back.
#pragma once

#include <string>
#include <vector>

#include "runtime.h"

namespace standin {

struct String : Object {
  explicit String(std::string value) : text(std::move(value)) {}
  std::string text;
};
String* make_string(const std::string& text);  // autoreleased

struct Array : Object {
  void dispose() override;
  std::vector<Object*> items;
};

struct Dictionary : Object {
  void dispose() override;
  std::vector<std::pair<Object*, Object*>> items;  // key, value
  const std::string* find(const std::string& key) const;
};

struct URL : Object {
  std::string path;
};

struct Error : Object {
  std::string text;
};
Error* make_error(const std::string& text);  // autoreleased

}  // namespace standin
