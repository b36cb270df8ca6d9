// foundation.cpp: strings, arrays, errors, pools, and the version of the system that this pretends to be.
#include "foundation.h"

#include "standin.h"

namespace standin {
namespace {

struct AutoreleasePool : Object {
  void dispose() override { pop_pool(this); }
};
struct ProcessInfo : Object {};
struct Version {
  long major, minor, patch;
};

String* string_of(Object*, SEL, const char* text, unsigned long) { return make_string(text); }
const char* utf8(String* self, SEL) { return self->text.c_str(); }
unsigned long string_length(String* self, SEL) { return self->text.size(); }

Array* array_of(Object*, SEL, Object* const* objects, unsigned long count) {
  auto* array = make("NSArray", new Array);
  for (unsigned long i = 0; i < count; ++i) {
    retain(objects[i]);
    array->items.push_back(objects[i]);
  }
  return autoreleased(array);
}
Array* array_of_one(Object* self, SEL selector, Object* object) { return array_of(self, selector, &object, 1); }
unsigned long array_count(Array* self, SEL) { return self->items.size(); }
Object* array_at(Array* self, SEL, unsigned long index) {
  if (index >= self->items.size()) fault("objectAtIndex: " + std::to_string(index) + " beyond the array's end");
  return self->items[index];
}

Dictionary* dictionary_of(Object*, SEL, Object* const* values, Object* const* keys, unsigned long count) {
  auto* dictionary = make("NSDictionary", new Dictionary);
  for (unsigned long i = 0; i < count; ++i) {
    retain(keys[i]);
    retain(values[i]);
    dictionary->items.emplace_back(keys[i], values[i]);
  }
  return autoreleased(dictionary);
}
Dictionary* dictionary_of_one(Object* self, SEL selector, Object* value, Object* key) {
  return dictionary_of(self, selector, &value, &key, 1);
}

URL* url_of(Object*, SEL, String* path) {
  auto* url = make("NSURL", new URL);
  url->path = path->text;
  return autoreleased(url);
}
const char* url_path(URL* self, SEL) { return self->path.c_str(); }

String* error_text(Error* self, SEL) { return make_string(self->text); }

Object* pool_alloc(Object*, SEL) {
  Object* pool = make("NSAutoreleasePool", new AutoreleasePool);
  push_pool(pool);
  return pool;
}
void pool_drain(Object* self, SEL) { release(self); }

ProcessInfo* process_info(Object*, SEL) {
  static ProcessInfo* info = [] {
    auto* made = new ProcessInfo;
    made->isa = class_named("NSProcessInfo");
    return made;
  }();
  return info;
}
bool at_least(Object*, SEL, Version version) {
  const Settings& s = settings();
  return s.os_major > version.major || (s.os_major == version.major && s.os_minor >= version.minor);
}
Version system_version(Object*, SEL) { return {settings().os_major, settings().os_minor, 0}; }
String* system_text(Object*, SEL) {
  return make_string("Version " + std::to_string(settings().os_major) + "." + std::to_string(settings().os_minor) +
                     " (stand-in)");
}

}  // namespace

String* make_string(const std::string& text) { return autoreleased(make("NSString", new String(text))); }

Error* make_error(const std::string& text) {
  auto* error = make("NSError", new Error);
  error->text = text;
  return autoreleased(error);
}

void Array::dispose() {
  for (Object* item : items) release(item);
}

void Dictionary::dispose() {
  for (const auto& [key, value] : items) {
    release(key);
    release(value);
  }
}

const std::string* Dictionary::find(const std::string& key) const {
  for (const auto& [name, value] : items) {
    if (static_cast<const String*>(name)->text == key) return &static_cast<const String*>(value)->text;
  }
  return nullptr;
}

void define_foundation() {
  define("NSString", {method("stringWithCString:encoding:", &string_of)},
         {method("UTF8String", &utf8), method("length", &string_length)});
  define("NSArray", {method("arrayWithObjects:count:", &array_of), method("arrayWithObject:", &array_of_one)},
         {method("count", &array_count), method("objectAtIndex:", &array_at)});
  define("NSDictionary",
         {method("dictionaryWithObjects:forKeys:count:", &dictionary_of),
          method("dictionaryWithObject:forKey:", &dictionary_of_one)},
         {});
  define("NSURL", {method("fileURLWithPath:", &url_of)}, {method("fileSystemRepresentation", &url_path)});
  define("NSError", {}, {method("localizedDescription", &error_text)});
  define("NSAutoreleasePool", {method("alloc", &pool_alloc)}, {method("drain", &pool_drain)});
  define("NSProcessInfo", {method("processInfo", &process_info)},
         {method("isOperatingSystemAtLeastVersion:", &at_least), method("operatingSystemVersion", &system_version),
          method("operatingSystemVersionString", &system_text)});
}

}  // namespace standin
