// libraries.h: the kernels of one GPU by name: compiled from the embedded sources when first asked for, then kept.
//
// Two forms of each source: base (Metal 3.1, simdgroup_matrix), which every Apple GPU runs, and tensor (Metal 4.0,
// matmul2d) for the GEMMs on GPUs with neural accelerators. Where the tensor form fails, base is used and said once.
#pragma once

#include <Metal/Metal.hpp>
#include <map>
#include <string>

#include "devices/metal/archive.h"
#include "devices/metal/context.h"
#include "devices/metal/sources.h"
#include "expertile/program.h"

namespace expertile::metal {

// What a GEMM's library multiplies with: the base form, or one of the two tensor forms.
enum class Matrix { Base, Staged, K4 };
// Of "base", "staged", "k4" or "" (staged); throws std::invalid_argument for another word.
Matrix matrix_of(const std::string& word);
bool has_tensor_units(const Context& context);

struct Pipeline {
  NS::SharedPtr<MTL::ComputePipelineState> state;
  const KernelInfo* kernel = nullptr;
};

class Libraries {
 public:
  // `chosen`: a tensor form that fails is an error, not a reason for another one.
  Libraries(const Context& context, Matrix matrix, bool chosen);
  ~Libraries();
  Libraries(const Libraries&) = delete;
  Libraries& operator=(const Libraries&) = delete;

  // Throws DeviceError naming the kernel, with the compiler's words.
  const Pipeline& pipeline(const KernelInfo& kernel);
  // To call behind a program's pipelines.
  void save() { archive_.save(); }
  // "" = none, or told before.
  std::string take_warning();

 private:
  struct Library {
    NS::SharedPtr<MTL::Library> library;
    std::string error;
  };
  const Library& library(const Source& source, Matrix form);
  // The pipeline, or nullptr with why; "" = the tensor form has no such kernel.
  NS::SharedPtr<MTL::ComputePipelineState> build(const KernelInfo& kernel, const Source& source, Matrix form,
                                                 std::string& why);
  void use_base(const std::string& why);
  void check(const Pipeline& pipeline) const;

  const Context& context_;
  Archive archive_;
  Matrix matrix_;
  bool chosen_;
  std::string warning_;
  std::map<std::pair<std::string, Matrix>, Library> libraries_;
  std::map<std::string, Pipeline> pipelines_;  // nodes stay where they are: launches keep pointers to them
};

}  // namespace expertile::metal
