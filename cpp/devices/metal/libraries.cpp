#include "devices/metal/libraries.h"

#include <utility>

#include "expertile/error.h"

namespace expertile::metal {
namespace {

const Source& source_of(const KernelInfo& kernel) {
  for (const Source& source : sources()) {
    if (std::string(kernel.file) == source.file) return source;
  }
  throw DeviceError(expected_got("kernel " + std::string(kernel.name), "an embedded source", kernel.file));
}

// No fast math: products and sums happen in the order written. The call for it changed with macOS 15.
void turn_fast_math_off(MTL::CompileOptions& options) {
  if (system_is_at_least(15, 0)) {
    options.setMathMode(MTL::MathModeSafe);
  } else {
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wdeprecated-declarations"
    options.setFastMathEnabled(false);
#pragma clang diagnostic pop
  }
}

// What tile_mma.h reads.
NS::Dictionary* macros_of(Matrix form) {
  const NS::Object* values[] = {text("1"), text(form == Matrix::K4 ? "1" : "0")};
  const NS::Object* names[] = {text("EXPERTILE_METAL_TENSOR"), text("EXPERTILE_METAL_K4")};
  return NS::Dictionary::dictionary(values, names, 2);
}

}  // namespace

Matrix matrix_of(const std::string& word) {
  if (word == "base") return Matrix::Base;
  if (word == "staged" || word.empty()) return Matrix::Staged;
  if (word == "k4") return Matrix::K4;
  throw std::invalid_argument(expected_got("open_device: matrix", "base, staged or k4", word));
}

bool has_tensor_units(const Context& context) {
  return context.device().supportsFamily(MTL::GPUFamily(1010)) && system_is_at_least(26, 2);
}

Libraries::Libraries(const Context& context, Matrix matrix, bool chosen)
    : context_(context), archive_(context), matrix_(matrix), chosen_(chosen) {}

Libraries::~Libraries() {
  const Pool pool;
  pipelines_.clear();
  libraries_.clear();
}

const Libraries::Library& Libraries::library(const Source& source, Matrix form) {
  const auto [place, fresh] = libraries_.try_emplace({source.file, form});
  Library& found = place->second;
  if (!fresh) return found;
  const auto options = NS::TransferPtr(MTL::CompileOptions::alloc()->init());
  turn_fast_math_off(*options.get());
  if (form != Matrix::Base) {
    options->setLanguageVersion(MTL::LanguageVersion4_0);
    options->setPreprocessorMacros(macros_of(form));
  } else {
    options->setLanguageVersion(MTL::LanguageVersion3_1);
  }
  NS::Error* error = nullptr;
  found.library = NS::TransferPtr(context_.device().newLibrary(text(source.text), options.get(), &error));
  if (!found.library) found.error = words(error);
  return found;
}

NS::SharedPtr<MTL::ComputePipelineState> Libraries::build(const KernelInfo& kernel, const Source& source, Matrix form,
                                                          std::string& why) {
  const Library& from = library(source, form);
  if (!from.library) {
    why = "the compiler's words on " + std::string(source.file) + ": " + from.error;
    return {};
  }
  const auto function = NS::TransferPtr(from.library->newFunction(text(kernel.name)));
  if (!function) {
    why = form == Matrix::Base ? "none in " + std::string(source.file) : "";
    return {};
  }
  const auto descriptor = NS::TransferPtr(MTL::ComputePipelineDescriptor::alloc()->init());
  descriptor->setComputeFunction(function.get());
  descriptor->setLabel(text(kernel.name));
  descriptor->setThreadGroupSizeIsMultipleOfThreadExecutionWidth(true);
  NS::Error* error = nullptr;
  auto state = archive_.pipeline(context_, *descriptor.get(), &error);
  if (!state) why = words(error);
  return state;
}

void Libraries::use_base(const std::string& why) {
  matrix_ = Matrix::Base;
  warning_ = expected_got("metal: " + context_.name(), "the tensor kernels to compile",
                          why + "; the base kernels run instead, slower");
}

const Pipeline& Libraries::pipeline(const KernelInfo& kernel) {
  const auto known = pipelines_.find(kernel.name);
  if (known != pipelines_.end()) return known->second;
  const Source& source = source_of(kernel);
  Pipeline made;
  made.kernel = &kernel;
  std::string why;
  if (matrix_ != Matrix::Base && source.uses_tiles && std::string(kernel.name).starts_with("gemm_")) {
    made.state = build(kernel, source, matrix_, why);
    if (!made.state && !why.empty() && !chosen_) {
      use_base(why);
      why.clear();
    }
  }
  if (!made.state && why.empty()) made.state = build(kernel, source, Matrix::Base, why);
  if (!made.state) throw DeviceError(expected_got("kernel " + std::string(kernel.name), "a pipeline", why));
  check(made);
  return pipelines_.emplace(kernel.name, std::move(made)).first->second;
}

void Libraries::check(const Pipeline& pipeline) const {
  const std::string where = "kernel " + std::string(pipeline.kernel->name);
  const auto most = pipeline.state->maxTotalThreadsPerThreadgroup();
  if (most < pipeline.kernel->threads) {
    throw DeviceError(expected_got(where, std::to_string(pipeline.kernel->threads) + " threads a threadgroup", most));
  }
  if (pipeline.state->threadExecutionWidth() != 32) {
    throw DeviceError(expected_got(where, "32 threads a simdgroup", pipeline.state->threadExecutionWidth()));
  }
  const auto memory = pipeline.state->staticThreadgroupMemoryLength();
  if (memory > context_.device().maxThreadgroupMemoryLength()) {
    throw DeviceError(expected_got(
        where,
        "at most " + std::to_string(context_.device().maxThreadgroupMemoryLength()) + " bytes of threadgroup memory",
        memory));
  }
}

std::string Libraries::take_warning() { return std::exchange(warning_, {}); }

}  // namespace expertile::metal
