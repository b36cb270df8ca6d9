// router.metal: the top K experts of each token, and their weights.
//
//   ids[t, :]     = the K largest logits of token t, largest first; of equal ones the lowest id first
//   weights[t, k] = exp(l_k - l_0) / sum over the chosen, in slot order
//
// logits [T, E] from the router's GEMM -> ids, weights [T, K] for the plan. NaN and -inf are never chosen.
// A token that holds +inf, or fewer than K finite logits: ids -1, weights 0, and layer + 1 in status[t] if that was 0.
#include <metal_stdlib>

#include "args.h"
#include "numeric.h"

using namespace metal;

// The first of the lane's logits, in the order of choice, that comes behind (value, id). None: -inf, E.
METAL_FUNC void next_candidate(const device float* logits, uint n_experts, uint lane, float value, uint id,
                               thread float& best, thread uint& best_id) {
  best = -INFINITY;
  best_id = n_experts;
  for (uint e = lane; e < n_experts; e += 32) {
    const float l = logits[e];
    const bool behind = l < value || (l == value && e > id);
    if (behind && l > best) {
      best = l;
      best_id = e;
    }
  }
}

METAL_FUNC bool holds_infinity(const device float* logits, uint n_experts, uint lane) {
  bool found = false;
  for (uint e = lane; e < n_experts; e += 32) {
    found = found || logits[e] == INFINITY;
  }
  return simd_any(found);
}

// One simdgroup a token. Each lane offers the best of its experts; only the lane that was chosen from looks again.
[[kernel, max_total_threads_per_threadgroup(32)]] void route_topk(
    constant RouteArgs& args [[buffer(0)]], const device float* logits [[buffer(1)]], device int* ids [[buffer(2)]],
    device float* weights [[buffer(3)]], device uint* status [[buffer(4)]], uint token [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  if (token >= args.n_tokens) {
    return;
  }
  const device float* in = logits + ulong(token) * args.n_experts;
  bool valid = !holds_infinity(in, args.n_experts, lane);
  float offered;
  uint offered_id;
  next_candidate(in, args.n_experts, lane, INFINITY, 0, offered, offered_id);
  float chosen = 0.0f;  // of slot `lane`
  uint chosen_id = 0;
  for (uint slot = 0; slot < args.top_k; ++slot) {
    float best = offered;
    uint best_id = offered_id;
    for (ushort step = 16; step > 0; step /= 2) {
      const float other = simd_shuffle_xor(best, step);
      const uint other_id = simd_shuffle_xor(best_id, step);
      if (other > best || (other == best && other_id < best_id)) {
        best = other;
        best_id = other_id;
      }
    }
    valid = valid && best > -INFINITY;
    if (lane == slot) {
      chosen = best;
      chosen_id = best_id;
    }
    if (best_id == offered_id && best_id < args.n_experts) {
      next_candidate(in, args.n_experts, lane, best, best_id, offered, offered_id);
    }
  }
  const float weight = exp(chosen - simd_broadcast(chosen, ushort(0)));
  float sum = 0.0f;
  for (uint slot = 0; slot < args.top_k; ++slot) {
    sum = sum + simd_broadcast(weight, ushort(slot));
  }
  if (lane < args.top_k) {
    const ulong at = ulong(token) * args.top_k + lane;
    ids[at] = valid ? int(chosen_id) : -1;
    weights[at] = valid ? weight / sum : 0.0f;
  }
  if (lane == 0 && !valid && status[token] == 0) {
    status[token] = args.layer + 1;
  }
}
