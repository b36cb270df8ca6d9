// metal_tensor.h: the part of Metal 4's tensors and of MetalPerformancePrimitives' matmul2d that kernels here use, for
// the emulator. What the hardware leaves open or gets wrong is made to show:
//   a cooperative tensor starts as garbage, and its elements lie in the lanes in no order one could guess;
//   the mode `multiply` overwrites; operands whose k differ (swapped extents) add zeros;
//   a static k beyond the extents reads NaN; an offset of 2 GB inside a tensor, a scope that is not what was
//   dispatched, and a thread that does not reach `run` are errors; element types that do not go together do not
//   compile.
#pragma once

#include <algorithm>
#include <array>
#include <string>
#include <type_traits>

#include "simd.h"

namespace expertile::msl {
inline namespace EXPERTILE_ISA {

struct bfloat {
  ushort bits;
};

namespace metal {

template <class T, size_t N>
using array = std::array<T, N>;

inline constexpr size_t dynamic_extent = static_cast<size_t>(-1);

template <class Index, size_t Rank>
struct dextents;
template <class Index>
struct dextents<Index, 2> {
  Index sizes[2];  // fastest first
  constexpr dextents(Index fastest, Index slowest) : sizes{fastest, slowest} {}
  constexpr Index extent(size_t i) const { return sizes[i]; }
};

struct tensor_inline {};

template <class Element, class Extents, class Descriptor = tensor_inline>
struct tensor;
template <class Element, class Index>
struct tensor<Element, dextents<Index, 2>, tensor_inline> {
  using element_type = Element;
  static_assert(!std::is_const_v<Element>, "an operand's elements are not const");

  tensor(Element* data, dextents<Index, 2> extents)
      : tensor(data, extents, array<Index, 2>{Index(1), extents.extent(0)}) {}
  tensor(Element* data, dextents<Index, 2> extents, array<Index, 2> strides)
      : data_(data), extents_(extents), strides_(strides) {}

  dextents<Index, 2> extents() const { return extents_; }
  // The same memory from element (i, j) on.
  tensor slice(Index i, Index j) const {
    tensor part(data_, dextents<Index, 2>(extents_.extent(0) - i, extents_.extent(1) - j), strides_);
    part.origin_ = offset(i, j);
    return part;
  }
  const Element& at(Index i, Index j) const { return data_[offset(i, j)]; }
  // For the operand that ends with element (i, j).
  void check_offset(Index i, Index j, emulator::Site site) const {
    const int64_t bytes = offset(i, j) * static_cast<int64_t>(sizeof(Element));
    if (bytes > 0x7fffffff) {
      emulator::fail_call("offsets below 2 GB inside a tensor", std::to_string(bytes) + " bytes", site);
    }
  }
  const void* data() const { return data_; }

 private:
  int64_t offset(Index i, Index j) const {
    return origin_ + static_cast<int64_t>(i) * strides_[0] + static_cast<int64_t>(j) * strides_[1];
  }

  Element* data_;
  dextents<Index, 2> extents_;
  array<Index, 2> strides_;
  int64_t origin_ = 0;
};

template <size_t N>
struct execution_simdgroups {
  static constexpr size_t static_size = N;
};
using execution_simdgroup = execution_simdgroups<1>;

// Each thread's share of `Layout::columns` x `Layout::rows` elements; its slots are more than it has elements.
template <class Element, class Layout>
class cooperative_tensor {
 public:
  using element_type = Element;
  using layout = Layout;

  cooperative_tensor() : slots_(Layout::slots()) { std::fill(std::begin(data_), std::end(data_), garbage()); }

  static constexpr ushort get_capacity() { return Layout::capacity; }
  bool is_valid_element(uint i, EXPERTILE_SITE) const { return slot(i, site) < Layout::elements; }
  // (column, row), fastest first.
  array<int, 2> get_multidimensional_index(uint i, EXPERTILE_SITE) const {
    const uint element = slot(i, site);
    if (element >= Layout::elements) {
      emulator::fail_call("the index of a valid element", "element " + std::to_string(i) + " of this thread", site);
    }
    return {static_cast<int>(element % Layout::columns), static_cast<int>(element / Layout::columns)};
  }
  Element& operator[](uint i) { return data_[i < Layout::capacity ? i : Layout::capacity]; }
  const Element& operator[](uint i) const { return data_[i < Layout::capacity ? i : Layout::capacity]; }

 private:
  uint slot(uint i, emulator::Site site) const {
    if (i < Layout::capacity) return slots_[i];
    emulator::fail_call("an element below the capacity " + std::to_string(Layout::capacity), std::to_string(i), site);
  }
  static Element garbage() {
    if constexpr (std::is_same_v<Element, float>) return __builtin_bit_cast(float, 0xffa5ffa5u);
    if constexpr (std::is_same_v<Element, half>) return half::from_bits(0xffa5);
  }

  const uint* slots_;  // this thread's elements; Layout::elements where a slot has none
  Element data_[Layout::capacity + 1];
};

template <class T>
inline constexpr bool is_cooperative = false;
template <class Element, class Layout>
inline constexpr bool is_cooperative<cooperative_tensor<Element, Layout>> = true;

}  // namespace metal

namespace mpp::tensor_ops {

struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
  int m, n, k;
  bool transpose_left, transpose_right, relaxed_precision;
  mode matmul_mode;
  constexpr matmul2d_descriptor(int m, int n, int k = static_cast<int>(metal::dynamic_extent),
                                bool transpose_left = false, bool transpose_right = false,
                                bool relaxed_precision = false, mode matmul_mode = mode::multiply)
      : m(m),
        n(n),
        k(k),
        transpose_left(transpose_left),
        transpose_right(transpose_right),
        relaxed_precision(relaxed_precision),
        matmul_mode(matmul_mode) {}
};

template <matmul2d_descriptor Descriptor, class Scope, class Left, class Right, int Columns, int Rows>
struct operand_layout {
  static constexpr uint columns = Columns, rows = Rows, elements = columns * rows, threads = Scope::static_size * 32;
  // A multiple of four, with slots that have no element.
  static constexpr uint capacity = ((elements + threads - 1) / threads + 3) / 4 * 4 + 4;

  static const uint* slots() {
    static const std::vector<uint> fours = emulator::tensor_layout(elements, threads, capacity, 4);
    static const std::vector<uint> ones = emulator::tensor_layout(elements, threads, capacity, 1);
    const uint thread = threads == 32 ? emulator::lane_in_simdgroup() : emulator::thread_in_threadgroup() % threads;
    return (emulator::elements_in_fours() ? fours : ones).data() + thread * capacity;
  }
};

template <matmul2d_descriptor Descriptor, class Scope>
class matmul2d {
  static constexpr bool dynamic_k = Descriptor.k == static_cast<int>(metal::dynamic_extent);
  static constexpr int simdgroups = static_cast<int>(Scope::static_size);
  static_assert(Descriptor.m % 16 == 0 || Descriptor.n % 16 == 0, "at least one of M and N is a multiple of 16");
  static_assert(Descriptor.m % 8 == 0 && Descriptor.n % 8 == 0, "M and N are multiples of 8");
  static_assert(dynamic_k || Descriptor.k % 16 == 0, "K is dynamic or a multiple of 16");

  template <class Left, class Right>
  static constexpr bool halves = std::is_same_v<Left, half> && std::is_same_v<Right, half>;

 public:
  template <class LeftElement, class RightElement, class Element, class Index = int>
  using cooperative_tensor_right_input_t =
      metal::cooperative_tensor<RightElement, operand_layout<Descriptor, Scope, LeftElement, RightElement,
                                                             Descriptor.transpose_right ? Descriptor.k : Descriptor.n,
                                                             Descriptor.transpose_right ? Descriptor.n : Descriptor.k>>;
  template <class Left, class Right, class Element, class Index = int>
  using cooperative_tensor_destination_t =
      metal::cooperative_tensor<Element, operand_layout<Descriptor, Scope, typename Left::element_type,
                                                        typename Right::element_type, Descriptor.n, Descriptor.m>>;

  template <class LeftElement, class RightElement, class Element, class Index = int>
  cooperative_tensor_right_input_t<LeftElement, RightElement, Element, Index> get_right_input_cooperative_tensor()
      const {
    static_assert(halves<LeftElement, RightElement>, "both operands are half");
    static_assert(simdgroups == 1, "operands in registers are one simdgroup's");
    static_assert(!dynamic_k, "operands in registers have a static K");
    return {};
  }
  template <class Left, class Right, class Element, class Index = int>
  cooperative_tensor_destination_t<Left, Right, Element, Index> get_destination_cooperative_tensor() const {
    static_assert(std::is_same_v<Element, float>, "the destination is float");
    return {};
  }

  // The calling thread's elements. The simdgroup's first thread reads the operands: no barrier is in this.
  template <class Left, class Right, class Destination>
  void run(Left& left, Right& right, Destination& destination, EXPERTILE_SITE) const {
    using LeftElement = typename Left::element_type;
    using RightElement = typename Right::element_type;
    static_assert(halves<LeftElement, RightElement>, "both operands are half");
    static_assert(std::is_same_v<Destination, cooperative_tensor_destination_t<Left, Right, float>>,
                  "the destination is this product's, of operands of these types in this order");
    const int inner = dynamic_k ? left.extents().extent(Descriptor.transpose_left ? 1 : 0) : Descriptor.k;
    const uint row_floats = (static_cast<uint>(inner) + 15u) / 16u * 16u;
    bool first = false;
    emulator::MatrixCall& call = emulator::tensor_call(simdgroups, left.data(), site, first);
    if (first) {
      call.left.assign(Descriptor.m * row_floats, 0.0f);
      call.right.assign(Descriptor.n * row_floats, 0.0f);
      if (same_inner(left, right)) {
        read(left, Descriptor.transpose_left, Descriptor.m, inner, row_floats, call.left.data(), site);
        if constexpr (!metal::is_cooperative<Right>) {
          read(right, !Descriptor.transpose_right, Descriptor.n, inner, row_floats, call.right.data(), site);
        }
      }
    }
    if constexpr (metal::is_cooperative<Right>) deposit(right, row_floats, call.right.data(), site);
    for (uint i = 0; i < Destination::get_capacity(); ++i) {
      if (!destination.is_valid_element(i)) continue;
      const auto at = destination.get_multidimensional_index(i);
      const float start =
          Descriptor.matmul_mode == matmul2d_descriptor::mode::multiply ? 0.0f : static_cast<float>(destination[i]);
      destination[i] = emulator::multiply_rows(call.left.data() + at[1] * row_floats,
                                               call.right.data() + at[0] * row_floats, row_floats / 16, start);
    }
    if constexpr (metal::is_cooperative<Right>) meet(site);  // the record is read to its end
  }

 private:
  static void meet(emulator::Site site) {
    emulator::simd_meet([](emulator::SimdOperation&) {}, "matmul2d", site);
  }

  // Where k lies in a row: of 16, the even ones come first.
  static uint place(uint k) { return k / 16 * 16 + k % 2 * 8 + k % 16 / 2; }

  template <class Left, class Right>
  static bool same_inner(const Left& left, const Right& right) {
    const int64_t k = left.extents().extent(Descriptor.transpose_left ? 1 : 0);
    if constexpr (metal::is_cooperative<Right>) {
      return k == Descriptor.k;
    } else {
      return k == right.extents().extent(Descriptor.transpose_right ? 0 : 1);
    }
  }

  // Rows of k, or, `transposed`, columns; zeros behind the last one, NaN behind the last k.
  template <class Tensor>
  static void read(const Tensor& tensor, bool transposed, int rows, int inner, uint row_floats, float* to,
                   emulator::Site site) {
    const int last_row = std::min(rows, static_cast<int>(tensor.extents().extent(transposed ? 0 : 1))) - 1;
    const int last_k = std::min(inner, static_cast<int>(tensor.extents().extent(transposed ? 1 : 0))) - 1;
    tensor.check_offset(transposed ? last_row : last_k, transposed ? last_k : last_row, site);
    for (int row = 0; row <= last_row; ++row) {
      for (int k = 0; k < inner; ++k) {
        const float value = k > last_k   ? __builtin_nanf("")
                            : transposed ? static_cast<float>(tensor.at(row, k))
                                         : static_cast<float>(tensor.at(k, row));
        to[static_cast<uint>(row) * row_floats + place(static_cast<uint>(k))] = value;
      }
    }
  }

  template <class Right>
  static void deposit(const Right& right, uint row_floats, float* to, emulator::Site site) {
    for (uint i = 0; i < Right::get_capacity(); ++i) {
      if (!right.is_valid_element(i)) continue;
      const auto at = right.get_multidimensional_index(i);
      const uint k = static_cast<uint>(at[Descriptor.transpose_right ? 0 : 1]);
      const uint n = static_cast<uint>(at[Descriptor.transpose_right ? 1 : 0]);
      to[n * row_floats + place(k)] = static_cast<float>(right[i]);
    }
    meet(site);
  }
};

}  // namespace mpp::tensor_ops
}  // namespace EXPERTILE_ISA
}  // namespace expertile::msl
