// dequantize.metal: the decoders by themselves, for tests: y[i] = weight i of w, fp32. One decode8 a thread.
#include "args.h"
#include "quant.h"

template <typename Format>
[[kernel, max_total_threads_per_threadgroup(256)]] void dequantize(constant DequantizeArgs& args [[buffer(0)]],
                                                                   const device uchar* w [[buffer(1)]],
                                                                   device float* y [[buffer(2)]],
                                                                   uint group [[threadgroup_position_in_grid]],
                                                                   uint thread_index [[thread_index_in_threadgroup]]) {
  const ulong first = (ulong(group) * 256 + thread_index) * 8;
  if (first >= args.n_values) {
    return;
  }
  // The row is cut to what this thread reads, so that its index stays 32 bits: a quant block has at most 256 weights.
  const ulong row = first / 256 * 256;
  float decoded[8];
  RowReader<Format>::read8(w + row / Format::elements * Format::bytes, uint(first - row),
                           uint(min(ulong(256), args.n_values - row)), decoded);
  for (uint j = 0; j < 8 && first + j < args.n_values; ++j) {
    y[first + j] = decoded[j];
  }
}

#define DEQUANTIZE_KERNEL(Format, suffix) \
  template [[host_name("dequantize_" #suffix)]] [[kernel]] decltype(dequantize<Format>) dequantize<Format>;

DEQUANTIZE_KERNEL(F32, f32)
DEQUANTIZE_KERNEL(F16, f16)
DEQUANTIZE_KERNEL(BF16, bf16)
DEQUANTIZE_KERNEL(Q4_0, q4_0)
DEQUANTIZE_KERNEL(Q5_0, q5_0)
DEQUANTIZE_KERNEL(Q5_1, q5_1)
DEQUANTIZE_KERNEL(Q8_0, q8_0)
DEQUANTIZE_KERNEL(Q2_0, q2_0)
DEQUANTIZE_KERNEL(Q2_K, q2_k)
DEQUANTIZE_KERNEL(Q3_K, q3_k)
DEQUANTIZE_KERNEL(Q4_K, q4_k)
DEQUANTIZE_KERNEL(Q5_K, q5_k)
DEQUANTIZE_KERNEL(Q6_K, q6_k)
DEQUANTIZE_KERNEL(IQ2_XXS, iq2_xxs)
DEQUANTIZE_KERNEL(IQ2_XS, iq2_xs)
DEQUANTIZE_KERNEL(IQ2_S, iq2_s)
DEQUANTIZE_KERNEL(IQ3_XXS, iq3_xxs)
DEQUANTIZE_KERNEL(IQ3_S, iq3_s)
DEQUANTIZE_KERNEL(IQ4_NL, iq4_nl)
DEQUANTIZE_KERNEL(IQ4_XS, iq4_xs)
