// simd.h: barriers and simdgroup functions for the emulator. The last lane to arrive computes the results of all.
#pragma once

#include <cstring>

#include "devices/emulator/lane.h"
#include "math.h"
#include "sync.h"

// Where a kernel called: the default argument is evaluated at the caller, where #line counts the .metal file's lines.
#define EXPERTILE_SITE ::expertile::emulator::Site site = {__builtin_FILE(), __builtin_LINE()}

namespace expertile::msl {
inline namespace EXPERTILE_ISA {
namespace metal {

inline void threadgroup_barrier(mem_flags, EXPERTILE_SITE) { emulator::threadgroup_barrier(site); }
inline void simdgroup_barrier(mem_flags, EXPERTILE_SITE) {
  emulator::simd_meet([](emulator::SimdOperation&) {}, "simdgroup_barrier", site);
}

// compute(in, out, parameter, live): arrays of 32 lanes, and the bits of those that take part.
template <class T, class Compute>
inline T simd_collective(T value, uint parameter, Compute, const char* name, emulator::Site site) {
  static_assert(sizeof(T) <= emulator::kSlotBytes && std::is_trivially_copyable_v<T>);
  const uint lane = emulator::lane_in_simdgroup();
  emulator::SimdOperation& operation = emulator::simd_operation();
  std::memcpy(operation.in[lane], &value, sizeof(T));
  operation.parameter[lane] = parameter;
  emulator::simd_meet(
      [](emulator::SimdOperation& o) {
        T in[32] = {};
        T out[32] = {};
        for (uint i = 0; i < 32; ++i) {
          if ((o.live >> i) & 1u) std::memcpy(&in[i], o.in[i], sizeof(T));
        }
        Compute{}(in, out, o.parameter, o.live);
        for (uint i = 0; i < 32; ++i) std::memcpy(o.out[i], &out[i], sizeof(T));
      },
      name, site);
  std::memcpy(&value, operation.out[lane], sizeof(T));
  return value;
}

// Reductions pair lanes 16, 8, 4, 2 and 1 apart, in that order.
template <class T, class Combine>
inline T simd_reduce(const T* in, uint live, Combine combine) {
  T value[32];
  bool present[32];
  for (uint i = 0; i < 32; ++i) {
    value[i] = in[i];
    present[i] = ((live >> i) & 1u) != 0;
  }
  for (uint distance = 16; distance != 0; distance /= 2) {
    for (uint i = 0; i < distance; ++i) {
      const uint j = i + distance;
      if (present[i] && present[j]) {
        value[i] = combine(value[i], value[j]);
      } else if (present[j]) {
        value[i] = value[j];
        present[i] = true;
      }
    }
  }
  return value[0];
}

#define EXPERTILE_SIMD_REDUCTION(name, expression)                                                  \
  template <class T>                                                                                \
  inline T name(T value, EXPERTILE_SITE) {                                                          \
    return simd_collective<T>(                                                                      \
        value, 0,                                                                                   \
        [](const T* in, T* out, const uint*, uint live) {                                           \
          const T all = simd_reduce(in, live, [](T a, T b) { return static_cast<T>(expression); }); \
          for (uint i = 0; i < 32; ++i) out[i] = all;                                               \
        },                                                                                          \
        #name, site);                                                                               \
  }
EXPERTILE_SIMD_REDUCTION(simd_sum, a + b)
EXPERTILE_SIMD_REDUCTION(simd_product, (a * b))
EXPERTILE_SIMD_REDUCTION(simd_max, metal::max(a, b))
EXPERTILE_SIMD_REDUCTION(simd_min, metal::min(a, b))
EXPERTILE_SIMD_REDUCTION(simd_or, a | b)
EXPERTILE_SIMD_REDUCTION(simd_and, (a & b))
EXPERTILE_SIMD_REDUCTION(simd_xor, a ^ b)
#undef EXPERTILE_SIMD_REDUCTION

template <class T>
inline T simd_prefix_exclusive_sum(T value, EXPERTILE_SITE) {
  return simd_collective<T>(
      value, 0,
      [](const T* in, T* out, const uint*, uint) {
        T sum = T(0);
        for (uint i = 0; i < 32; ++i) {
          out[i] = sum;
          sum = static_cast<T>(sum + in[i]);
        }
      },
      "simd_prefix_exclusive_sum", site);
}
template <class T>
inline T simd_prefix_inclusive_sum(T value, EXPERTILE_SITE) {
  return simd_collective<T>(
      value, 0,
      [](const T* in, T* out, const uint*, uint) {
        T sum = T(0);
        for (uint i = 0; i < 32; ++i) out[i] = sum = static_cast<T>(sum + in[i]);
      },
      "simd_prefix_inclusive_sum", site);
}

// The value of lane source(lane, parameter); a lane beyond the simdgroup's ends gets its own; one that has returned is
// an error.
template <class T, class Source>
inline T simd_move(T value, uint parameter, Source, const char* name, emulator::Site site) {
  return simd_collective<T>(
      value, parameter,
      [](const T* in, T* out, const uint* parameters, uint live) {
        for (uint i = 0; i < 32; ++i) {
          if (((live >> i) & 1u) == 0) continue;
          const uint source = Source{}(i, parameters[i]);
          const uint from = source < 32 ? source : i;
          if (((live >> from) & 1u) == 0) emulator::fail_returned_lane(from);
          out[i] = in[from];
        }
      },
      name, site);
}
template <class T>
inline T simd_shuffle(T value, ushort lane, EXPERTILE_SITE) {
  return simd_move(value, lane, [](uint, uint p) { return p; }, "simd_shuffle", site);
}
template <class T>
inline T simd_shuffle_xor(T value, ushort mask, EXPERTILE_SITE) {
  return simd_move(value, mask, [](uint i, uint p) { return i ^ p; }, "simd_shuffle_xor", site);
}
template <class T>
inline T simd_shuffle_up(T value, ushort delta, EXPERTILE_SITE) {
  return simd_move(value, delta, [](uint i, uint p) { return i - p; }, "simd_shuffle_up", site);
}
template <class T>
inline T simd_shuffle_down(T value, ushort delta, EXPERTILE_SITE) {
  return simd_move(value, delta, [](uint i, uint p) { return i + p; }, "simd_shuffle_down", site);
}
template <class T>
inline T simd_broadcast(T value, ushort lane, EXPERTILE_SITE) {
  return simd_move(value, lane, [](uint, uint p) { return p; }, "simd_broadcast", site);
}
template <class T>
inline T simd_broadcast_first(T value, EXPERTILE_SITE) {
  return simd_collective<T>(
      value, 0,
      [](const T* in, T* out, const uint*, uint live) {
        for (uint i = 0; i < 32; ++i) out[i] = in[std::countr_zero(live)];
      },
      "simd_broadcast_first", site);
}

inline simd_vote simd_ballot(bool value, EXPERTILE_SITE) {
  return simd_vote(simd_collective<uint>(
      value ? 1u : 0u, 0,
      [](const uint* in, uint* out, const uint*, uint) {
        uint bits = 0;
        for (uint i = 0; i < 32; ++i) bits |= in[i] << i;
        for (uint i = 0; i < 32; ++i) out[i] = bits;
      },
      "simd_ballot", site));
}
inline bool simd_any(bool value, EXPERTILE_SITE) { return simd_or<uint>(value ? 1u : 0u, site) != 0; }
inline bool simd_all(bool value, EXPERTILE_SITE) { return simd_and<uint>(value ? 1u : 0u, site) != 0; }
inline bool simd_is_first(EXPERTILE_SITE) {
  return simd_broadcast_first<uint>(emulator::lane_in_simdgroup(), site) == emulator::lane_in_simdgroup();
}

}  // namespace metal
}  // namespace EXPERTILE_ISA
}  // namespace expertile::msl
