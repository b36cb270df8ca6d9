// simdgroup_matrix.h: 8x8 matrices for the emulator.
//
// A lane owns the two elements that Apple's layout gives it. Loads and products need no meeting of the lanes: the first
// lane to make a call works out the whole matrix, and the others take their elements from its record; so the first lane
// alone knows whole matrices. Where it does not (elements were set lane by lane), the lanes exchange them.
#pragma once

#include "simd.h"

namespace expertile::msl {
inline namespace EXPERTILE_ISA {
namespace metal {

template <class T, int Columns, int Rows>
struct simdgroup_matrix;

template <class T>
struct simdgroup_matrix<T, 8, 8> {
  static_assert(std::is_same_v<T, half> || std::is_same_v<T, float>, "simdgroup_matrix holds half or float");

  vec<T, 2> own;  // row(), column() and column() + 1
  mutable bool whole_known = false;
  alignas(16) mutable float whole[64];

  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal) {
    own = vec<T, 2>(row() == column() ? diagonal : T(0.0f), row() == column() + 1 ? diagonal : T(0.0f));
  }
  vec<T, 2>& thread_elements() {
    whole_known = false;  // the caller may write, and what the others write is not known
    return own;
  }
  const vec<T, 2>& thread_elements() const { return own; }

  static uint row() {
    const uint lane = emulator::lane_in_simdgroup();
    return ((lane >> 2) & 4u) + ((lane >> 1) & 3u);
  }
  static uint column() {
    const uint lane = emulator::lane_in_simdgroup();
    return ((lane >> 1) & 4u) + ((lane & 1u) << 1);
  }

  // Each lane gets all 64 elements, as floats.
  void exchange(emulator::Site site) const {
    const float pair[2] = {static_cast<float>(own.x), static_cast<float>(own.y)};
    emulator::SimdOperation& operation = emulator::simd_operation();
    std::memcpy(operation.in[emulator::lane_in_simdgroup()], pair, sizeof(pair));
    emulator::simd_meet([](emulator::SimdOperation&) {}, "simdgroup_multiply", site);
    for (uint i = 0; i < 32; ++i) {
      const uint r = ((i >> 2) & 4u) + ((i >> 1) & 3u);
      const uint c = ((i >> 1) & 4u) + ((i & 1u) << 1);
      std::memcpy(&whole[r * 8 + c], operation.in[i], sizeof(pair));
    }
    whole_known = true;
  }

  // Takes the result of a call, rounded to T: the lane that worked it out keeps the whole.
  void take(emulator::MatrixCall& call, bool first) {
    if (first) {
      if constexpr (std::is_same_v<T, half>) {
        for (float& element : call.whole) element = static_cast<float>(half(element));
      }
      std::memcpy(whole, call.whole, sizeof(whole));
    }
    whole_known = first;
    const float* pair = &call.whole[row() * 8 + column()];
    own = vec<T, 2>(pair[0], pair[1]);
  }
};

using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;

template <class T, int Columns, int Rows>
inline simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(std::type_identity_t<T> value) {
  simdgroup_matrix<T, Columns, Rows> result;
  result.own = vec<T, 2>(value);
  for (float& element : result.whole) element = static_cast<float>(value);
  result.whole_known = true;
  return result;
}

template <class T>
inline T* matrix_origin(T* memory, ulong elements_per_row, const vec<ulong, 2>& origin, bool transpose) {
  return memory + (transpose ? origin.x * elements_per_row + origin.y : origin.y * elements_per_row + origin.x);
}

template <class T>
inline void simdgroup_load(simdgroup_matrix<T, 8, 8>& to, const T* from, ulong elements_per_row = 8,
                           vec<ulong, 2> origin = vec<ulong, 2>(0ul), bool transpose = false, EXPERTILE_SITE) {
  from = matrix_origin(from, elements_per_row, origin, transpose);
  bool first = false;
  emulator::MatrixCall& call = emulator::matrix_call(from, site, first);
  if (first) emulator::load_matrix(call.whole, from, sizeof(T), elements_per_row, transpose);
  to.take(call, first);
}

template <class T>
inline void simdgroup_store(const simdgroup_matrix<T, 8, 8>& from, T* to, ulong elements_per_row = 8,
                            vec<ulong, 2> origin = vec<ulong, 2>(0ul), bool transpose = false, EXPERTILE_SITE) {
  to = matrix_origin(to, elements_per_row, origin, transpose);
  bool first = false;
  emulator::matrix_call(to, site, first);
  const uint r = from.row();
  const uint c = from.column();
  to[transpose ? c * elements_per_row + r : r * elements_per_row + c] = from.own.x;
  to[transpose ? (c + 1) * elements_per_row + r : r * elements_per_row + c + 1] = from.own.y;
}

// d = a b + c: acc = RNE(acc + a[k] b[k]) in fp32, k ascending, as measured on Apple hardware; rounded once to D.
template <class D, class A, class B, class C>
inline void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                          const simdgroup_matrix<B, 8, 8>& b, const simdgroup_matrix<C, 8, 8>& c,
                                          EXPERTILE_SITE) {
  constexpr bool exact = std::is_same_v<A, half> && std::is_same_v<B, half>;
  bool first = false;
  emulator::MatrixCall& call = emulator::matrix_call(nullptr, site, first);
  if (first && a.whole_known && b.whole_known && c.whole_known) {
    emulator::multiply_accumulate(call.whole, a.whole, b.whole, c.whole, exact);
    call.shared = true;
  }
  if (call.shared) {
    d.take(call, first);
    return;
  }
  a.exchange(site);
  b.exchange(site);
  c.exchange(site);
  emulator::MatrixCall own_call;
  emulator::multiply_accumulate(own_call.whole, a.whole, b.whole, c.whole, exact);
  d.take(own_call, true);
}

template <class D, class A, class B>
inline void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                               const simdgroup_matrix<B, 8, 8>& b, EXPERTILE_SITE) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(0.0f), site);
}

}  // namespace metal
}  // namespace EXPERTILE_ISA
}  // namespace expertile::msl
