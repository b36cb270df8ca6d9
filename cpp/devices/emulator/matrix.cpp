// matrix.cpp: the arithmetic of simdgroup_matrix and matmul2d, and how cooperative tensors lie in the threads. The
// host's half conversion instruction is used where it is there.
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>

#include "devices/emulator/lane.h"
#include "host/half.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace expertile::emulator {
namespace {

void widen_soft(float* to, const std::uint16_t* from) {
  for (int i = 0; i < 64; ++i) to[i] = msl::half_bits_to_float_soft(from[i]);
}

#if defined(__x86_64__)
__attribute__((target("f16c,avx"))) void widen_f16c(float* to, const std::uint16_t* from) {
  for (int i = 0; i < 64; i += 8) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(halves));
  }
}
#endif

using Widen = void (*)(float*, const std::uint16_t*);

Widen choose_widen() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("f16c") && __builtin_cpu_supports("avx")) return widen_f16c;
#endif
  return widen_soft;
}

// One row of d; products of halves need no fused operation.
void exact_row(float* d, const float* a, const float* b, const float* c) {
  typedef float Vector __attribute__((vector_size(16)));
  Vector low, high, b_low, b_high;
  std::memcpy(&low, c, sizeof(low));
  std::memcpy(&high, c + 4, sizeof(high));
  for (int k = 0; k < 8; ++k) {
    std::memcpy(&b_low, b + 8 * k, sizeof(b_low));
    std::memcpy(&b_high, b + 8 * k + 4, sizeof(b_high));
    low = low + a[k] * b_low;
    high = high + a[k] * b_high;
  }
  std::memcpy(d, &low, sizeof(low));
  std::memcpy(d + 4, &high, sizeof(high));
}

void fused_row(float* d, const float* a, const float* b, const float* c) {
  for (int j = 0; j < 8; ++j) {
    float sum = c[j];
    for (int k = 0; k < 8; ++k) sum = std::fma(a[k], b[8 * k + j], sum);
    d[j] = sum;
  }
}

#if defined(__x86_64__)
__attribute__((target("fma,avx"))) void fused_row_fma(float* d, const float* a, const float* b, const float* c) {
  __m256 sum = _mm256_loadu_ps(c);
  for (int k = 0; k < 8; ++k) sum = _mm256_fmadd_ps(_mm256_set1_ps(a[k]), _mm256_loadu_ps(b + 8 * k), sum);
  _mm256_storeu_ps(d, sum);
}
#endif

using Row = void (*)(float*, const float*, const float*, const float*);

Row choose_fused_row() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("fma") && __builtin_cpu_supports("avx")) return fused_row_fma;
#endif
  return fused_row;
}

template <class T>
void copy_rows(T* to, const T* from, std::uint64_t elements_per_row, bool transpose) {
  for (int r = 0; r < 8; ++r) {
    if (!transpose) {
      std::memcpy(to + 8 * r, from + static_cast<std::uint64_t>(r) * elements_per_row, 8 * sizeof(T));
    } else {
      for (int c = 0; c < 8; ++c) to[8 * r + c] = from[static_cast<std::uint64_t>(c) * elements_per_row + r];
    }
  }
}

}  // namespace

void load_matrix(float* to, const void* from, std::size_t element_bytes, std::uint64_t elements_per_row,
                 bool transpose) {
  if (element_bytes == sizeof(float)) {
    copy_rows(to, static_cast<const float*>(from), elements_per_row, transpose);
    return;
  }
  static const Widen widen = choose_widen();
  std::uint16_t halves[64];
  copy_rows(halves, static_cast<const std::uint16_t*>(from), elements_per_row, transpose);
  widen(to, halves);
}

void multiply_accumulate(float* d, const float* a, const float* b, const float* c, bool exact) {
  static const Row fused = choose_fused_row();
  for (int r = 0; r < 64; r += 8) (exact ? exact_row : fused)(d + r, a + r, b, c + r);
}

// p[i] = RNE(a[2i] b[2i] + a[2i+1] b[2i+1]), products exact; q[j] = RNE(p[j] + p[j+4]); sum = RNE(sum + q[j]) by j.
float multiply_rows(const float* a, const float* b, std::uint32_t chunks, float sum) {
  typedef float Vector __attribute__((vector_size(16)));
  for (std::uint32_t chunk = 0; chunk < chunks; ++chunk, a += 16, b += 16) {
    Vector left[4], right[4];  // even k, even k, odd k, odd k
    std::memcpy(left, a, sizeof(left));
    std::memcpy(right, b, sizeof(right));
    const Vector low = left[0] * right[0] + left[2] * right[2];
    const Vector high = left[1] * right[1] + left[3] * right[3];
    const Vector q = low + high;
    for (int j = 0; j < 4; ++j) sum = sum + q[j];
  }
  return sum;
}

std::vector<std::uint32_t> tensor_layout(std::uint32_t elements, std::uint32_t threads, std::uint32_t capacity,
                                         std::uint32_t run) {
  std::vector<std::uint32_t> places(threads * capacity / run);
  std::iota(places.begin(), places.end(), 0u);
  std::mt19937 random(elements + threads);
  for (std::size_t i = places.size(); i > 1; --i) std::swap(places[i - 1], places[random() % i]);
  std::vector<std::uint32_t> slots(threads * capacity, elements);
  for (std::uint32_t element = 0; element < elements; ++element) {
    slots[places[element / run] * run + element % run] = element;
  }
  return slots;
}

}  // namespace expertile::emulator
