// metal_library.cpp: libraries from source, functions, pipelines and binary archives of the fake driver.
#include <fstream>

#include "devices/metal/sources.h"
#include "objects.h"

namespace standin {
namespace {

constexpr unsigned long kVersion31 = MTL::LanguageVersion3_1, kVersion40 = MTL::LanguageVersion4_0;
constexpr unsigned long kFailOnMiss = MTL::PipelineOptionFailOnBinaryArchiveMiss;

template <class T>
Object* plain_alloc(Object* self, SEL) {
  return make(static_cast<Class*>(self)->name, new T);
}

Object* failed(Error** error, const std::string& text) {
  if (error != nullptr) *error = make_error(text);
  return nullptr;
}

void replace(Object*& slot, Object* value) {
  if (value != nullptr) retain(value);
  if (slot != nullptr) release(slot);
  slot = value;
}

void set_language(CompileOptions* self, SEL, unsigned long version) { self->language = version; }
void set_math_mode(CompileOptions* self, SEL, long mode) {
  if (settings().os_major < 15) fault("unrecognized selector -[MTLCompileOptions setMathMode:] before macOS 15");
  self->safe_math = mode == MTL::MathModeSafe;
}
void set_fast_math(CompileOptions* self, SEL, bool enabled) { self->safe_math = !enabled; }
void set_macros(CompileOptions* self, SEL, Object* macros) { replace(self->macros, macros); }

// What Apple's compiler would be told to compile, as far as this can judge; "" = nothing is wrong.
std::string refusal(const std::string& text, const CompileOptions* options, bool tensor) {
  for (std::size_t at = text.find("#include"); at != std::string::npos; at = text.find("#include", at + 1)) {
    const std::size_t name = text.find_first_not_of(' ', at + 8);
    if (name != std::string::npos && text[name] == '"') {
      return "fatal error: " + text.substr(name, text.find('\n', name) - name) + " file not found";
    }
  }
  if (options->language > kVersion31 && settings().os_major < 26) return "invalid value for the language standard";
  if (tensor && options->language < kVersion40) return "error: use of undeclared identifier 'tensor' before Metal 4.0";
  return "";
}

Object* new_function(LibraryObject* self, SEL, String* name) {
  const expertile::emulator::LoweredKernel* kernel = expertile::emulator::find_lowered(name->text);
  if (kernel == nullptr || self->file != kernel->info.file) return nullptr;
  auto* function = make("MTLFunction", new FunctionObject(self->device, "MTLFunction"));
  function->kernel = kernel;
  function->form = self->form;
  return function;
}

void set_function(PipelineDescriptor* self, SEL, FunctionObject* function) {
  Object* slot = self->function;
  replace(slot, function);
  self->function = static_cast<FunctionObject*>(slot);
}
void set_archives(PipelineDescriptor* self, SEL, Array* archives) {
  Object* slot = self->archives;
  replace(slot, archives);
  self->archives = static_cast<Array*>(slot);
}
void set_multiple(PipelineDescriptor* self, SEL, bool multiple) { self->multiple_of_simd_width = multiple; }
void set_label(Object*, SEL, Object*) {}

unsigned long pipeline_threads(PipelineObject* self, SEL) {
  return std::min<unsigned long>(settings().max_threads, self->kernel->info.threads);
}
unsigned long simd_width(PipelineObject*, SEL) { return 32; }
unsigned long static_memory(PipelineObject*, SEL) { return 0; }  // the emulator holds the 32 KB itself

void set_url(ArchiveDescriptor* self, SEL, URL* url) {
  Object* slot = self->url;
  replace(slot, url);
  self->url = static_cast<URL*>(slot);
}

std::string unusable(const PipelineDescriptor* descriptor) {
  if (descriptor->function == nullptr) fault("a pipeline's descriptor without a function");
  const std::string key = descriptor->function->key();
  return settings().fails_as_pipeline == key ? "Compiler encountered an internal error: " + key : "";
}

bool add_functions(ArchiveObject* self, SEL, PipelineDescriptor* descriptor, Error** error) {
  if (const std::string why = unusable(descriptor); !why.empty()) return failed(error, why) != nullptr;
  if (self->keys.insert(descriptor->function->key()).second) ++counts().pipelines;
  return true;
}

bool serialize(ArchiveObject* self, SEL, URL* url, Error** error) {
  if (self->keys.empty()) return failed(error, "Nothing to serialize") != nullptr;
  std::ofstream file(url->path);
  file << "standin archive\n";
  for (const std::string& key : self->keys) file << key << "\n";
  file.close();
  if (!file) return failed(error, "The file could not be written: " + url->path) != nullptr;
  return true;
}

}  // namespace

void CompileOptions::dispose() {
  if (macros != nullptr) release(macros);
}

void PipelineDescriptor::dispose() {
  if (function != nullptr) release(function);
  if (archives != nullptr) release(archives);
}

Object* new_library(DeviceObject* self, SEL, String* source, CompileOptions* options, Error** error) {
  if (options == nullptr) fault("newLibraryWithSource: no options, so fast math");
  if (!options->safe_math) fault("newLibraryWithSource: fast math is on");
  if (options->language == 0) fault("newLibraryWithSource: no language version was set");
  if (options->language != kVersion31 && options->language != kVersion40) {
    fault("newLibraryWithSource: language version " + std::to_string(options->language) + " is not 3.1 or 4.0");
  }
  const auto* macros = static_cast<const Dictionary*>(options->macros);
  const std::string* tensor = macros != nullptr ? macros->find("EXPERTILE_METAL_TENSOR") : nullptr;
  const std::string* k4 = macros != nullptr ? macros->find("EXPERTILE_METAL_K4") : nullptr;
  const std::string why = refusal(source->text, options, tensor != nullptr);
  if (!why.empty()) return failed(error, "program_source:1:1: " + why);
  if (tensor == nullptr && options->language == kVersion40)
    fault("newLibraryWithSource: the base library as Metal 4.0");
  if (tensor != nullptr && *tensor != "1") fault("EXPERTILE_METAL_TENSOR is " + *tensor + ", not 1");
  const std::string form = tensor == nullptr ? "" : k4 != nullptr && *k4 == "1" ? " k4" : " tensor";
  for (const expertile::metal::Source& embedded : expertile::metal::sources()) {
    if (source->text != embedded.text) continue;
    if (tensor != nullptr && !embedded.uses_tiles) fault(std::string(embedded.file) + " has no tensor form");
    const std::string name = embedded.file + form;
    if (settings().fails_to_compile == name) {
      return failed(error, std::string("program_source:7:1: error: planted in ") + name);
    }
    ++counts().libraries;
    auto* library = make("MTLLibrary", new LibraryObject(self, "MTLLibrary"));
    library->file = embedded.file;
    library->form = form;
    return library;
  }
  fault("newLibraryWithSource: the text is none of the embedded sources");
}

Object* new_pipeline(DeviceObject* self, SEL, PipelineDescriptor* descriptor, unsigned long options, const void*,
                     Error** error) {
  if (const std::string why = unusable(descriptor); !why.empty()) return failed(error, why);
  const std::string key = descriptor->function->key();
  bool found = false;
  for (const Object* item : descriptor->archives != nullptr ? descriptor->archives->items : std::vector<Object*>{}) {
    found |= static_cast<const ArchiveObject*>(item)->keys.contains(key);
  }
  if (!found && (options & kFailOnMiss) != 0) return failed(error, "not in the binary archive: " + key);
  ++(found ? counts().from_archive : counts().pipelines);
  auto* pipeline = make("MTLComputePipelineState", new PipelineObject(self, "MTLComputePipelineState"));
  pipeline->kernel = descriptor->function->kernel;
  pipeline->tensor = !descriptor->function->form.empty();
  pipeline->multiple_of_simd_width = descriptor->multiple_of_simd_width;
  return pipeline;
}

Object* new_archive(DeviceObject* self, SEL, ArchiveDescriptor* descriptor, Error** error) {
  std::set<std::string> keys;
  if (descriptor->url != nullptr) {
    std::ifstream file(descriptor->url->path);
    std::string line;
    if (!std::getline(file, line) || line != "standin archive") {
      return failed(error, "Invalid file: " + descriptor->url->path);
    }
    while (std::getline(file, line)) keys.insert(line);
  }
  auto* archive = make("MTLBinaryArchive", new ArchiveObject(self, "MTLBinaryArchive"));
  archive->keys = std::move(keys);
  return archive;
}

void define_library_classes() {
  define("MTLCompileOptions", {method("alloc", &plain_alloc<CompileOptions>)},
         {method("setLanguageVersion:", &set_language), method("setMathMode:", &set_math_mode),
          method("setFastMathEnabled:", &set_fast_math), method("setPreprocessorMacros:", &set_macros)});
  define("MTLLibrary", {}, {method("newFunctionWithName:", &new_function), method("setLabel:", &set_label)});
  define("MTLFunction", {}, {});
  define(
      "MTLComputePipelineDescriptor", {method("alloc", &plain_alloc<PipelineDescriptor>)},
      {method("setComputeFunction:", &set_function), method("setBinaryArchives:", &set_archives),
       method("setThreadGroupSizeIsMultipleOfThreadExecutionWidth:", &set_multiple), method("setLabel:", &set_label)});
  define("MTLComputePipelineState", {},
         {method("maxTotalThreadsPerThreadgroup", &pipeline_threads), method("threadExecutionWidth", &simd_width),
          method("staticThreadgroupMemoryLength", &static_memory)});
  define("MTLBinaryArchiveDescriptor", {method("alloc", &plain_alloc<ArchiveDescriptor>)},
         {method("setUrl:", &set_url)});
  define("MTLBinaryArchive", {},
         {method("addComputePipelineFunctionsWithDescriptor:error:", &add_functions),
          method("serializeToURL:error:", &serialize)});
}

}  // namespace standin
