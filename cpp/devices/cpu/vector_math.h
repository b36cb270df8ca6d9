// vector_math.h: exp and what is made of it, over rows. Included behind simd_*.h.
//
// Products and sums are separate (never fused), so that every instruction set gives the same bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

// e^x = 2^n * e^r with |r| <= ln(2)/2: within 1.5 units in the last place; infinite from 128 ln 2 on, NaN for NaN.
inline Simd::Vector exp(Simd::Vector x) {
  using V = Simd::Vector;
  const V inside = Simd::clamp(x, -104.0f, 89.0f);
  const V shift = Simd::all(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  const V n = Simd::subtract(Simd::add(Simd::multiply(inside, Simd::all(1.44269504f)), shift), shift);
  // ln 2 in two parts, the first short enough that n times it is exact.
  V r = Simd::subtract(inside, Simd::multiply(n, Simd::all(0.693359375f)));
  r = Simd::subtract(r, Simd::multiply(n, Simd::all(-2.12194440e-4f)));
  constexpr float kTerms[] = {1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f};
  V sum = Simd::all(kTerms[0]);
  for (int i = 1; i < 6; ++i) sum = Simd::add(Simd::multiply(sum, r), Simd::all(kTerms[i]));
  sum = Simd::add(Simd::multiply(Simd::multiply(sum, r), r), r);
  sum = Simd::add(sum, Simd::all(1.0f));
  V half, rest;
  Simd::powers_of_two(n, &half, &rest);
  return Simd::multiply(Simd::multiply(sum, half), rest);
}

inline Simd::Vector one_plus_exp_of_minus(Simd::Vector x) {
  return Simd::add(Simd::all(1.0f), exp(Simd::subtract(Simd::all(0.0f), x)));
}
inline Simd::Vector sigmoid(Simd::Vector x) { return Simd::divide(Simd::all(1.0f), one_plus_exp_of_minus(x)); }
inline Simd::Vector silu(Simd::Vector x) { return Simd::divide(x, one_plus_exp_of_minus(x)); }

// Calls step(where, 16 values of each row) over n values; the last, short step works on copies.
template <class Out, class Step>
inline void for_vectors(const float* a, const float* b, std::size_t n, Out* to, const Step& step) {
  std::size_t k = 0;
  for (; k + 16 <= n; k += 16) step(Simd::load(a + k), Simd::load(b + k), to + k);
  if (k == n) return;
  alignas(64) float tail_a[16] = {}, tail_b[16] = {};
  alignas(64) Out tail_to[16];
  std::memcpy(tail_a, a + k, 4 * (n - k));
  std::memcpy(tail_b, b + k, 4 * (n - k));
  step(Simd::load(tail_a), Simd::load(tail_b), tail_to);
  std::memcpy(to + k, tail_to, sizeof(Out) * (n - k));
}

void sigmoid_row(const float* x, std::size_t n, float* to) {
  for_vectors(x, x, n, to, [](Simd::Vector v, Simd::Vector, float* out) { Simd::store(out, sigmoid(v)); });
}

void exp_row(const float* x, std::size_t n, float* to) {
  for_vectors(x, x, n, to, [](Simd::Vector v, Simd::Vector, float* out) { Simd::store(out, exp(v)); });
}

void silu_half_row(const float* x, float divisor, std::size_t n, std::uint16_t* to, std::uint64_t* saturated) {
  for_vectors(x, x, n, to, [&](Simd::Vector v, Simd::Vector, std::uint16_t* out) {
    const Simd::Vector value = silu(Simd::divide(v, Simd::all(divisor)));
    Simd::store_half(out, Simd::saturate(value, *saturated));
  });
}

void swiglu_half_row(const float* gate, const float* up, std::size_t n, std::uint16_t* to, std::uint64_t* saturated) {
  for_vectors(gate, up, n, to, [&](Simd::Vector g, Simd::Vector u, std::uint16_t* out) {
    Simd::store_half(out, Simd::saturate(Simd::multiply(silu(g), u), *saturated));
  });
}

void scale_row(const float* x, float scale, std::size_t n, float* to) {
  for_vectors(x, x, n, to,
              [&](Simd::Vector v, Simd::Vector, float* out) { Simd::store(out, Simd::multiply(Simd::all(scale), v)); });
}

void add_scaled_row(const float* x, float scale, std::size_t n, float* to) {
  for_vectors(to, x, n, to, [&](Simd::Vector sum, Simd::Vector v, float* out) {
    Simd::store(out, Simd::add(sum, Simd::multiply(Simd::all(scale), v)));
  });
}

void normalise_row(const float* x, float inverse, const float* gamma, std::size_t n, float* to) {
  for_vectors(x, gamma, n, to, [&](Simd::Vector v, Simd::Vector weight, float* out) {
    Simd::store(out, Simd::multiply(Simd::multiply(v, Simd::all(inverse)), weight));
  });
}

void add_product_row(const float* a, const float* b, std::size_t n, float* to) {
  std::size_t k = 0;
  for (; k + 16 <= n; k += 16) {
    Simd::store(to + k, Simd::add(Simd::load(to + k), Simd::multiply(Simd::load(a + k), Simd::load(b + k))));
  }
  for (; k < n; ++k) to[k] = to[k] + a[k] * b[k];
}

float square_sum(const float* x, std::size_t n) {
  Simd::Vector sum = Simd::all(0.0f);
  std::size_t k = 0;
  for (; k + 16 <= n; k += 16) {
    const Simd::Vector v = Simd::load(x + k);
    sum = Simd::add(sum, Simd::multiply(v, v));
  }
  if (k < n) {
    alignas(64) float tail[16] = {};
    std::memcpy(tail, x + k, 4 * (n - k));
    const Simd::Vector v = Simd::load(tail);
    sum = Simd::add(sum, Simd::multiply(v, v));
  }
  return Simd::sum(sum);
}

}  // namespace
