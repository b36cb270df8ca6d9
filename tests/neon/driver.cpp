// driver.cpp: every inner loop of the table "neon" beside the portable one's, for test_neon.py.
//
// Prints a line for each: its name, and how many values differ in their bits (NaN equals NaN).
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "devices/cpu/kernels.h"

using namespace expertile;
using cpu::Kernels;
using Floats = std::vector<float>;
using Halves = std::vector<std::uint16_t>;

namespace {

const Kernels* neon;
const Kernels* portable;
std::mt19937 random_bits(3);

bool same(float a, float b) { return std::memcmp(&a, &b, sizeof(a)) == 0 || (a != a && b != b); }
bool same(std::uint16_t a, std::uint16_t b) { return a == b || ((a & 0x7fff) > 0x7c00 && (b & 0x7fff) > 0x7c00); }

template <class T>
long differing(const std::vector<T>& a, const std::vector<T>& b) {
  long count = 0;
  for (std::size_t i = 0; i < a.size(); ++i) count += same(a[i], b[i]) ? 0 : 1;
  return count;
}

void report(const std::string& name, long count) { std::printf("%s %ld\n", name.c_str(), count); }

// Exact in fp32, as products of two of them are.
Floats small_numbers(std::size_t n) {
  Floats x(n);
  for (float& v : x) v = static_cast<float>(static_cast<int>(random_bits() % 4001) - 2000) / 512.0f;
  return x;
}
// Of every kind: NaN, infinite and subnormal ones too.
Floats any_numbers(std::size_t n) {
  Floats x(n);
  for (float& v : x) {
    const std::uint32_t bits = static_cast<std::uint32_t>(random_bits());
    std::memcpy(&v, &bits, sizeof(v));
  }
  return x;
}

// Random blocks, every second time with zeros among their bytes, so that scales are not all huge.
std::vector<std::uint8_t> random_blocks(std::size_t bytes, bool tame) {
  std::vector<std::uint8_t> blocks(bytes);
  for (std::uint8_t& byte : blocks) byte = static_cast<std::uint8_t>(random_bits() & (tame ? 0x2f : 0xff));
  return blocks;
}

void compare_format(const TypeInfo& info) {
  constexpr std::size_t kWeights = 5, kRows = 4;
  const std::size_t n_inner = info.elements == 1 ? 588 : 768, stride = cpu::padded(n_inner);
  const std::size_t row_bytes = n_inner / info.elements * info.bytes;
  const cpu::FormatKernels a = neon->format(info.type), b = portable->format(info.type);
  long count = 0;
  for (int turn = 0; turn < 60; ++turn) {
    const std::vector<std::uint8_t> blocks = random_blocks(kWeights * row_bytes, turn % 2 == 0);
    Floats decoded_a(stride, -1.0f), decoded_b(stride, -2.0f);
    a.decode(blocks.data(), n_inner, decoded_a.data());
    b.decode(blocks.data(), n_inner, decoded_b.data());
    count += differing(decoded_a, decoded_b);
    Floats rows = small_numbers(kRows * stride);
    for (std::size_t row = 0; row < kRows; ++row) {
      std::fill(rows.begin() + row * stride + n_inner, rows.begin() + (row + 1) * stride, 0.0f);
    }
    const std::uint8_t* weights[kWeights];
    for (std::size_t w = 0; w < kWeights; ++w) weights[w] = blocks.data() + w * row_bytes;
    for (int n_rows = 1; n_rows <= static_cast<int>(kRows); ++n_rows) {
      Floats sums_a(kRows * kWeights), sums_b(kRows * kWeights);
      cpu::DirectStep step{weights, kWeights, rows.data(), stride, n_rows, n_inner, sums_a.data(), kWeights};
      a.direct(step);
      step.sums = sums_b.data();
      b.direct(step);
      count += differing(sums_a, sums_b);
    }
  }
  report(info.name, count);
}

// Rows of every length to 200. `run` takes a table, two rows and its result's place.
template <class T>
void compare_rows(const char* name, const std::function<void(const Kernels&, Floats, const Floats&, T*)>& run) {
  long count = 0;
  for (std::size_t n = 1; n <= 200; ++n) {
    for (const Floats& x : {small_numbers(n), any_numbers(n)}) {
      const Floats y = small_numbers(n);
      std::vector<T> a(n + 1), b(n + 1);  // the last is for what is counted
      run(*neon, x, y, a.data());
      run(*portable, x, y, b.data());
      count += differing(a, b);
    }
  }
  report(name, count);
}

void compare_all_rows() {
  compare_rows<float>("exp_row",
                      [](const Kernels& k, Floats x, const Floats&, float* to) { k.exp_row(x.data(), x.size(), to); });
  compare_rows<float>("sigmoid_row", [](const Kernels& k, Floats x, const Floats&, float* to) {
    k.sigmoid_row(x.data(), x.size(), to);
  });
  compare_rows<float>("scale_row", [](const Kernels& k, Floats x, const Floats&, float* to) {
    k.scale_row(x.data(), 1.7f, x.size(), to);
  });
  compare_rows<float>("add_scaled_row", [](const Kernels& k, Floats x, const Floats& y, float* to) {
    std::copy(y.begin(), y.end(), to);
    k.add_scaled_row(x.data(), 1.7f, x.size(), to);
  });
  compare_rows<float>("add_product_row", [](const Kernels& k, Floats x, const Floats& y, float* to) {
    std::copy(y.begin(), y.end(), to);
    k.add_product_row(x.data(), y.data(), x.size(), to);
  });
  compare_rows<float>("normalise_row", [](const Kernels& k, Floats x, const Floats& y, float* to) {
    k.normalise_row(x.data(), 0.37f, y.data(), x.size(), to);
  });
  compare_rows<float>("square_sum", [](const Kernels& k, Floats x, const Floats&, float* to) {
    to[0] = k.square_sum(x.data(), x.size());
  });
  compare_rows<float>("bf16_row", [](const Kernels& k, Floats x, const Floats&, float* to) {
    const std::size_t n = x.size();
    x.resize(cpu::padded(n));
    k.bf16_row(n, x.data());
    std::copy_n(x.begin(), n, to);
  });
  compare_rows<float>("half_row", [](const Kernels& k, Floats x, const Floats&, float* to) {
    Halves halves(x.size());
    std::memcpy(halves.data(), x.data(), 2 * x.size());
    Floats wide(cpu::padded(x.size()), -1.0f);
    k.half_row(halves.data(), halves.size(), wide.data());
    std::copy_n(wide.begin(), x.size(), to);
  });
}

void compare_saturating_rows() {
  const auto count_into = [](std::uint16_t* to, std::size_t n, std::uint32_t count) {
    to[n] = static_cast<std::uint16_t>(count);
  };
  compare_rows<std::uint16_t>("round_row", [=](const Kernels& k, Floats x, const Floats&, std::uint16_t* to) {
    std::uint64_t saturated = 0;
    k.round_row(x.data(), x.size(), to, &saturated);
    count_into(to, x.size(), saturated);
  });
  compare_rows<std::uint16_t>("silu_half_row", [=](const Kernels& k, Floats x, const Floats&, std::uint16_t* to) {
    std::uint64_t saturated = 0;
    k.silu_half_row(x.data(), 4.0f, x.size(), to, &saturated);
    count_into(to, x.size(), saturated);
  });
  compare_rows<std::uint16_t>("swiglu_half_row", [=](const Kernels& k, Floats x, const Floats& y, std::uint16_t* to) {
    std::uint64_t saturated = 0;
    k.swiglu_half_row(x.data(), y.data(), x.size(), to, &saturated);
    count_into(to, x.size(), saturated);
  });
}

// Every size of the micro-kernel, in two steps, beside the portable one of one weight and one row.
void compare_multiply(const char* name, void (*Kernels::*multiply)(const cpu::MicroStep&)) {
  constexpr std::size_t kStride = 64, kInner = 32, kMost = 16;
  const auto run = [&](const Kernels& k, const float* weights, const float* rows, int n_weights, int n_rows) {
    Floats partial(kMost * kMost * cpu::kLanes), sums(kMost * kMost);
    for (std::size_t at = 0; at < 2 * kInner; at += kInner) {
      (k.*multiply)({weights + at, kStride, rows + at, kStride, kInner, partial.data(), sums.data(), kMost, n_weights,
                     n_rows, at == 0, at != 0});
    }
    return sums;
  };
  long count = 0;
  for (int n_weights = 1; n_weights <= neon->micro_weights; ++n_weights) {
    for (int n_rows = 1; n_rows <= neon->micro_rows; ++n_rows) {
      const Floats weights = small_numbers(kMost * kStride), rows = small_numbers(kMost * kStride);
      const Floats sums = run(*neon, weights.data(), rows.data(), n_weights, n_rows);
      for (int r = 0; r < n_rows; ++r) {
        for (int w = 0; w < n_weights; ++w) {
          const Floats one = run(*portable, weights.data() + w * kStride, rows.data() + r * kStride, 1, 1);
          count += same(sums[static_cast<std::size_t>(r) * kMost + static_cast<std::size_t>(w)], one[0]) ? 0 : 1;
        }
      }
    }
  }
  report(name, count);
}

}  // namespace

int main() {
  neon = cpu::find_kernels("neon");
  portable = cpu::find_kernels("portable");
  if (neon == nullptr || portable == nullptr) return 1;
  for (const TypeInfo& info : type_table()) compare_format(info);
  compare_all_rows();
  compare_saturating_rows();
  compare_multiply("multiply", &Kernels::multiply);
  compare_multiply("multiply_fp32", &Kernels::multiply_fp32);
  return 0;
}
