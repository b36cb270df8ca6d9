// metal_strict_tensor.h: declarations of Metal 4's tensors and of matmul2d with real address spaces (metal/strict.py),
// as far as kernels here use them. What the headers are known to refuse, this refuses: const elements, operands in
// constant memory or that are no lvalues, half with another type, a tile that no unit has.
#pragma once

namespace metal {

template <class T, size_t N>
struct array {
  T values[N];
  T& operator[](size_t);
  const T& operator[](size_t) const;
};

constexpr size_t dynamic_extent = size_t(-1);

template <class Index, size_t Rank>
struct dextents;
template <class Index>
struct dextents<Index, 2> {
  dextents(Index fastest, Index slowest);
  Index extent(size_t) const;
};

template <class T>
struct strict_space {
  typedef T type;
  static constexpr bool readable = true, writable = true;
};
template <class T>
struct strict_space<const T> : strict_space<T> {
  static constexpr bool writable = false;
};
template <class T>
struct strict_space<STRICT_DEVICE T> : strict_space<T> {};
template <class T>
struct strict_space<STRICT_THREADGROUP T> : strict_space<T> {};
template <class T>
struct strict_space<const STRICT_DEVICE T> : strict_space<const T> {};
template <class T>
struct strict_space<const STRICT_THREADGROUP T> : strict_space<const T> {};
template <class T>
struct strict_space<const STRICT_CONSTANT T> : strict_space<const T> {
  static constexpr bool readable = false;
};

template <class A, class B>
constexpr bool strict_is_same = false;
template <class A>
constexpr bool strict_is_same<A, A> = true;

struct tensor_inline {};

template <class Element, class Extents, class Descriptor = tensor_inline>
struct tensor {
  typedef typename strict_space<Element>::type element_type;
  static_assert(strict_space<Element>::readable, "an operand does not lie in constant memory");
  static_assert(strict_space<Element>::writable, "an operand's elements are not const");
  tensor(Element*, Extents);
  template <class Strides>
  tensor(Element*, Extents, Strides);
  Extents extents() const;
  template <class... Index>
  tensor slice(Index...) const;
};

template <class Element, class Layout>
struct cooperative_tensor {
  typedef Element element_type;
  static constexpr ushort get_capacity() { return 64; }
  bool is_valid_element(ushort) const;
  array<int, 2> get_multidimensional_index(ushort) const;
  Element& operator[](ushort);
  const Element& operator[](ushort) const;
};

}  // namespace metal

namespace mpp {
namespace tensor_ops {

template <size_t N>
struct execution_simdgroups {
  static constexpr size_t simdgroups = N;
};
typedef execution_simdgroups<1> execution_simdgroup;

struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
  int m, n, k;
  bool transpose_left, transpose_right, relaxed_precision;
  mode matmul_mode;
  constexpr matmul2d_descriptor(int m, int n, int k = int(metal::dynamic_extent), bool transpose_left = false,
                                bool transpose_right = false, bool relaxed_precision = false,
                                mode matmul_mode = mode::multiply)
      : m(m),
        n(n),
        k(k),
        transpose_left(transpose_left),
        transpose_right(transpose_right),
        relaxed_precision(relaxed_precision),
        matmul_mode(matmul_mode) {}
};

template <matmul2d_descriptor Descriptor, class Scope, class Left, class Right>
struct strict_layout {};

template <matmul2d_descriptor Descriptor, class Scope>
struct matmul2d {
  static_assert(Descriptor.m % 16 == 0 || Descriptor.n % 16 == 0, "M or N is a multiple of 16");
  static_assert(Descriptor.m % 8 == 0 && Descriptor.n % 8 == 0, "M and N are multiples of 8");
  static_assert(Descriptor.k == int(metal::dynamic_extent) || Descriptor.k % 16 == 0, "K is a multiple of 16");

  template <class Left, class Right, class Element, class Index = int>
  using cooperative_tensor_right_input_t =
      metal::cooperative_tensor<Right, strict_layout<Descriptor, Scope, Left, Right>>;
  template <class Left, class Right, class Element, class Index = int>
  using cooperative_tensor_destination_t = metal::cooperative_tensor<
      Element, strict_layout<Descriptor, Scope, typename Left::element_type, typename Right::element_type>>;

  template <class Left, class Right, class Element, class Index = int>
  cooperative_tensor_right_input_t<Left, Right, Element, Index> get_right_input_cooperative_tensor() const {
    static_assert(Scope::simdgroups == 1, "operands in registers are one simdgroup's");
    return {};
  }
  template <class Left, class Right, class Element, class Index = int>
  cooperative_tensor_destination_t<Left, Right, Element, Index> get_destination_cooperative_tensor() const {
    return {};
  }

  template <class Left, class Right, class Destination>
  void run(Left&, Right&, Destination&) const {
    static_assert(metal::strict_is_same<typename Left::element_type, half> &&
                      metal::strict_is_same<typename Right::element_type, half>,
                  "both operands are half");
    static_assert(metal::strict_is_same<Destination, cooperative_tensor_destination_t<Left, Right, float>>,
                  "the destination is this product's");
  }
};

}  // namespace tensor_ops
}  // namespace mpp
