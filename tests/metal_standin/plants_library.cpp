// plants_library.cpp: libraries that Metal would not compile, or not as meant.
#include "plants.h"

#include "rig.h"

namespace standin {

Plants library_plants() {
  return {
      {"fast math",
       [] {
         Rig rig;
         rig.options->setMathMode(MTL::MathModeFast);
         rig.compile(source_of("plan.metal"));
       }},
      {"no options",
       [] {
         Rig rig;
         NS::Error* error = nullptr;
         rig.device->newLibrary(text(source_of("plan.metal")), nullptr, &error);
       }},
      {"no language version",
       [] {
         Rig rig;
         rig.options = NS::TransferPtr(MTL::CompileOptions::alloc()->init());
         rig.options->setMathMode(MTL::MathModeSafe);
         rig.compile(source_of("plan.metal"));
       }},
      {"base library as Metal 4.0",
       [] {
         Rig rig;
         rig.options->setLanguageVersion(MTL::LanguageVersion4_0);
         rig.compile(source_of("gemm.metal"));
       }},
      {"tensor library as Metal 3.1",
       [] {
         Rig rig;
         rig.options->setPreprocessorMacros(NS::Dictionary::dictionary(text("1"), text("EXPERTILE_METAL_TENSOR")));
         rig.compile(source_of("gemm.metal"));
       }},
      {"include that nobody resolves", [] { Rig().compile("#include \"args.h\"\n"); }},
      {"another text", [] { Rig().compile("kernel void mm_clear() {}\n"); }},
      {"kernel that is not there",
       [] {
         Rig rig;
         const auto none = rig.pipeline("plan.metal", "mm_gather_h");
       }},
  };
}

const Plants& plants() {
  static const auto all = [] {
    auto every = encoder_plants();
    every.merge(memory_plants());
    every.merge(library_plants());
    return every;
  }();
  return all;
}

}  // namespace standin
