"""What every step of a layer's MoE half means, in numpy float64: the oracle of the tests.

Steps in order: `hc_read` -> `route` -> (the plan: `expertile.plan`) -> `gather` -> `experts` -> `combine`, beside them
`shared`, and last `hc_write`. `layer` is all of them, `prompt` is layer after layer.

Each step takes `operands`, "exact" or "fp16": how a GEMM rounds what it multiplies (`expertile.numeric`). With "fp16",
router, inject and shared gate stay unrounded where they are stored as F32.

Weights are decoded where they are used, expert by expert, so that a layer of a full-size model works for a few tokens.
Formulas: llama.cpp, src/models/qwen4exp.cpp.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from expertile.layer_weights import Array, LayerWeights
from expertile.numeric import HALF_MAX, Operands, product, sigmoid, silu, to_half

__all__ = [
    "FP32_PARTS",
    "HALF_MAX",
    "Operands",
    "Step",
    "combine",
    "combine_fp32",
    "experts",
    "gather",
    "hc_read",
    "hc_write",
    "layer",
    "product",
    "prompt",
    "route",
    "route_topk",
    "shared",
    "sigmoid",
    "silu",
    "to_half",
]

Step = dict[str, Any]

# Used with fp32 weights and fp32 activations by the kernels where the file stores them as F32.
FP32_PARTS = ("ffn_gate_inp", "ffn_gate_inp_shexp", "hc_ffn_inject")


def _small_product(x: Array, weights: LayerWeights, part: str, operands: Operands) -> Array:
    keeps_fp32 = part in FP32_PARTS and weights.tensor(part).type == "F32"
    return product(x, weights.matrix(part), "exact" if keeps_fp32 else operands)


def _expect_shape(where: str, array: Array, shape: tuple[int | None, ...]) -> None:
    fits = array.ndim == len(shape) and all(want in (None, got) for got, want in zip(array.shape, shape, strict=True))
    if not fits:
        named = ", ".join("T" if size is None else str(size) for size in shape)
        raise ValueError(f"[{where}] expected shape ({named}), got {array.shape}")


def hc_read(x: npt.ArrayLike, weights: LayerWeights, operands: Operands = "exact") -> Step:
    """Read the residual streams into one vector a token.

    xn[c] = x[c] / sqrt(mean(x[c]^2) + eps) * gamma[c];  lo = silu((W_down @ xn) / C);  gate = W_up @ lo
    mixed = (1 / C) * sum_c xn[c] * sigmoid(gate[c]);    inject = W_inject @ xn

    x          [T, C, D]  float
    return: a dict of
    inv_rms    [T, C]     float64
    xn         [T, C, D]  float64  not rounded in either mode
    lo         [T, R]     float64  after silu
    gate       [T, C, D]  float64  before the sigmoid
    mixed      [T, D]     float64
    inject     [T, C]     float64  before / C and the sigmoid
    saturated  -          int      activations that met the half limit ("fp16": of xn, lo and mixed)

    Errors: ValueError for another shape of x.

    >>> from expertile.layer_weights import example_weights
    >>> step = hc_read(np.ones((3, 2, 8)), example_weights())
    >>> step["mixed"].shape, bool(np.allclose(step["inv_rms"], 1, atol=1e-6))
    ((3, 8), True)
    """
    streams = np.asarray(x, dtype=np.float64)
    n_streams, dim = weights.n_streams, weights.dim
    _expect_shape("hc_read", streams, (None, n_streams, dim))
    n_tokens = len(streams)
    inv_rms = 1.0 / np.sqrt(np.mean(streams * streams, axis=2) + weights.eps)
    gamma = weights.matrix("hc_ffn_norm").reshape(n_streams, dim)
    xn = streams * inv_rms[:, :, None] * gamma
    flat = xn.reshape(n_tokens, n_streams * dim)
    lo = silu(_small_product(flat, weights, "hc_ffn_down", operands) / n_streams)
    gate = _small_product(lo, weights, "hc_ffn_up", operands).reshape(xn.shape)
    mixed = np.sum(xn * sigmoid(gate), axis=1) / n_streams
    saturated = sum(to_half(v)[1] for v in (xn, lo, mixed)) if operands == "fp16" else 0
    inject = _small_product(flat, weights, "hc_ffn_inject", operands)
    return {
        "inv_rms": inv_rms,
        "xn": xn,
        "lo": lo,
        "gate": gate,
        "mixed": mixed,
        "inject": inject,
        "saturated": saturated,
    }


def route_topk(logits: npt.ArrayLike, top_k: int) -> tuple[npt.NDArray[np.int32], Array, list[int]]:
    """Choose the top K experts of each token, and their weights.

    ids: the K largest logits as fp32, largest first, ties to the lowest id; NaN counts as -inf, -inf is never chosen
    weights = softmax over the chosen logits

    logits  [T, E]  float
    top_k   -       int
    return  [T, K]  int32    ids
    return  [T, K]  float64  weights; a token's sum is 1
    return  -       list     tokens with +inf, or with fewer than K finite logits: ids -1, weights 0

    Errors: ValueError for top_k outside 1..E.

    >>> ids, weights, faults = route_topk([[0.0, 2.0, 2.0, 1.0], [0.0, np.nan, np.nan, -np.inf]], 2)
    >>> ids.tolist(), weights.tolist(), faults
    ([[1, 2], [-1, -1]], [[0.5, 0.5], [0.0, 0.0]], [1])
    """
    given = np.asarray(logits, dtype=np.float64)
    if given.ndim != 2 or not 1 <= top_k <= given.shape[1]:
        raise ValueError(f"[route_topk] expected logits (T, E) and top_k in 1..E, got {given.shape} and {top_k}")
    with np.errstate(over="ignore"):
        keys = given.astype(np.float32)
    keys = np.where(np.isnan(keys), np.float32(-np.inf), keys)
    order = np.argsort(-keys, axis=1, kind="stable")[:, :top_k]
    finite = np.count_nonzero(np.isfinite(keys), axis=1)
    fault = np.any(keys == np.inf, axis=1) | (finite < top_k)
    chosen = np.where(fault[:, None], 0.0, np.take_along_axis(given, order, axis=1))
    exponent = np.exp(chosen - chosen.max(axis=1, keepdims=True))
    weights = exponent / exponent.sum(axis=1, keepdims=True)
    ids = np.where(fault[:, None], -1, order).astype(np.int32)
    return ids, np.where(fault[:, None], 0.0, weights), [int(token) for token in np.flatnonzero(fault)]


def route(mixed: npt.ArrayLike, weights: LayerWeights, operands: Operands = "exact") -> Step:
    """Router: logits = W_router @ mixed, then `route_topk`.

    mixed    [T, D]  float
    return: a dict of
    logits   [T, E]  float64
    ids      [T, K]  int32
    weights  [T, K]  float64
    faults   -       list     tokens that cannot be routed

    >>> from expertile.layer_weights import example_weights
    >>> step = route(np.eye(8)[:3], example_weights())
    >>> step["ids"].shape, step["faults"]
    ((3, 2), [])
    """
    activations = np.asarray(mixed, dtype=np.float64)
    _expect_shape("route", activations, (None, weights.dim))
    logits = _small_product(activations, weights, "ffn_gate_inp", operands)
    ids, route_weights, faults = route_topk(logits, weights.top_k)
    return {"logits": logits, "ids": ids, "weights": route_weights, "faults": faults}


def gather(x: npt.ArrayLike, row_token: npt.ArrayLike) -> npt.NDArray[Any]:
    """Rows of the plan: rows[r] = x[row_token[r]], zero where row_token[r] is -1 (padding). Exact; keeps x's type.

    x          [T, D]       any
    row_token  [n_rows]     int32
    return     [n_rows, D]  type of x

    >>> gather(np.array([[1.0], [2.0]]), [1, -1, 0]).tolist()
    [[2.0], [0.0], [1.0]]
    """
    source, tokens = np.asarray(x), np.asarray(row_token)
    rows = np.zeros((len(tokens), source.shape[1]), dtype=source.dtype)
    rows[tokens >= 0] = source[tokens[tokens >= 0]]
    return rows


def experts(mixed: npt.ArrayLike, ids: npt.ArrayLike, weights: LayerWeights, operands: Operands = "exact") -> Step:
    """The chosen experts' feed-forward networks, entry by entry.

    gate = Gate_e mixed;  up = Up_e mixed;  act = silu(gate) * up;  down = Down_e act;  each times its tensor's `.scale`

    mixed      [T, D]     float
    ids        [T, K]     int      -1 = skipped: zeros
    return: a dict of
    gate, up   [T, K, F]  float64
    act        [T, K, F]  float64  not rounded in either mode
    down       [T, K, D]  float64
    saturated  -          int      of act

    Errors: ValueError for an id outside -1..E-1, or ids of another T.

    >>> from expertile.layer_weights import example_weights
    >>> step = experts(np.ones((1, 8)), [[3, -1]], example_weights())
    >>> step["down"].shape, bool(step["down"][0, 0].any()), bool(step["down"][0, 1].any())
    ((1, 2, 8), True, False)
    """
    activations, chosen = np.asarray(mixed, dtype=np.float64), np.asarray(ids)
    _expect_shape("experts", activations, (None, weights.dim))
    if chosen.ndim != 2 or len(chosen) != len(activations):
        raise ValueError(f"[experts] expected ids ({len(activations)}, K), got {chosen.shape}")
    if chosen.size and not (chosen.min() >= -1 and chosen.max() < weights.n_experts):
        raise ValueError(f"[experts] expected ids in -1..{weights.n_experts - 1}, got {chosen.min()}..{chosen.max()}")
    ffn = int(weights.tensor("ffn_down_exps").shape[0])
    gate, up, act = (np.zeros((*chosen.shape, ffn)) for _ in range(3))
    down = np.zeros((*chosen.shape, weights.dim))
    saturated = 0
    for expert in np.unique(chosen[chosen >= 0]).tolist():
        at = np.nonzero(chosen == expert)
        rows = activations[at[0]]
        g = product(rows, weights.expert("gate", expert), operands, weights.scale("ffn_gate_exps", expert))
        u = product(rows, weights.expert("up", expert), operands, weights.scale("ffn_up_exps", expert))
        h = silu(g) * u
        gate[at], up[at], act[at] = g, u, h
        down[at] = product(h, weights.expert("down", expert), operands, weights.scale("ffn_down_exps", expert))
        saturated += to_half(h)[1] if operands == "fp16" else 0
    return {"gate": gate, "up": up, "act": act, "down": down, "saturated": saturated}


def combine(ids: npt.ArrayLike, route_weights: npt.ArrayLike, down: npt.ArrayLike) -> Array:
    """routed[t] = sum over kept slots of route_weights[t, k] * down[t, k], float64.

    ids            [T, K]     int      -1 = skipped
    route_weights  [T, K]     float
    down           [T, K, D]  float
    return         [T, D]     float64

    >>> combine([[0, -1]], [[0.5, 0.5]], [[[2.0], [100.0]]]).tolist()
    [[1.0]]
    """
    factor = np.where(np.asarray(ids) >= 0, np.asarray(route_weights, dtype=np.float64), 0.0)
    values = np.where((np.asarray(ids) >= 0)[:, :, None], np.asarray(down, dtype=np.float64), 0.0)
    return np.asarray(np.sum(factor[:, :, None] * values, axis=1))


def combine_fp32(position: npt.ArrayLike, row_weight: npt.ArrayLike, y: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """`mm_combine`, bit for bit: acc = +0, then acc = acc + (w * y) in fp32, in slot order, skipped entries left out.

    position    [T, K]       int32    row of the entry, -1 = skipped
    row_weight  [n_rows]     float32
    y           [n_rows, D]  float32  the down GEMM's rows
    return      [T, D]       float32

    >>> combine_fp32([[1, -1, 0]], np.float32([1, 1]), np.float32([[1.0], [2**24]])).tolist()
    [[16777216.0]]
    """
    rows, weight, values = np.asarray(position), np.asarray(row_weight), np.asarray(y)
    if weight.dtype != np.float32 or values.dtype != np.float32:
        raise ValueError(f"[combine_fp32] expected float32, got row_weight {weight.dtype} and y {values.dtype}")
    if rows.ndim != 2:
        raise ValueError(f"[combine_fp32] expected position (T, K), got {rows.shape}")
    total = np.zeros((len(rows), values.shape[1]), dtype=np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for slot in range(rows.shape[1]):
            kept = np.flatnonzero(rows[:, slot] >= 0)
            at = rows[kept, slot]
            total[kept] = total[kept] + weight[at][:, None] * values[at]
    return total


def shared(mixed: npt.ArrayLike, weights: LayerWeights, operands: Operands = "exact") -> Step:
    """The shared expert of every token.

    down = DownS(silu(GateS mixed) * (UpS mixed));  shared_gate = sigmoid(w_sg . mixed);  shared = shared_gate * down

    mixed          [T, D]   float
    return: a dict of
    gate, up, act  [T, Fs]  float64
    down           [T, D]   float64  ("ys" in the kernels)
    gate_logit     [T]      float64  ("sgv")
    shared_gate    [T]      float64
    shared         [T, D]   float64
    saturated      -        int      of act

    >>> from expertile.layer_weights import example_weights
    >>> shared(np.zeros((2, 8)), example_weights())["shared_gate"].tolist()
    [0.5, 0.5]
    """
    activations = np.asarray(mixed, dtype=np.float64)
    _expect_shape("shared", activations, (None, weights.dim))

    def apply(part: str, values: Array) -> Array:
        return product(values, weights.matrix(part), operands, weights.scale(part))

    gate, up = apply("ffn_gate_shexp", activations), apply("ffn_up_shexp", activations)
    act = silu(gate) * up
    down = apply("ffn_down_shexp", act)
    logit = _small_product(activations, weights, "ffn_gate_inp_shexp", operands)[:, 0]
    opened = sigmoid(logit)
    return {
        "gate": gate,
        "up": up,
        "act": act,
        "down": down,
        "gate_logit": logit,
        "shared_gate": opened,
        "shared": opened[:, None] * down,
        "saturated": to_half(act)[1] if operands == "fp16" else 0,
    }


def hc_write(x: npt.ArrayLike, inject: npt.ArrayLike, out: npt.ArrayLike) -> Array:
    """Write one vector a token into the residual streams: x[c] + 2 * sigmoid(inject[c] / C) * out.

    x       [T, C, D]  float
    inject  [T, C]     float
    out     [T, D]     float    routed + shared
    return  [T, C, D]  float64

    >>> hc_write(np.zeros((1, 2, 1)), [[0.0, 1e9]], [[3.0]]).tolist()
    [[[3.0], [6.0]]]
    """
    streams = np.asarray(x, dtype=np.float64)
    strength = 2.0 * sigmoid(np.asarray(inject, dtype=np.float64) / streams.shape[1])
    return np.asarray(streams + strength[:, :, None] * np.asarray(out, dtype=np.float64)[:, None, :])


def layer(
    x: npt.ArrayLike,
    weights: LayerWeights,
    operands: Operands = "exact",
    routing: tuple[npt.ArrayLike, npt.ArrayLike] | None = None,
) -> Step:
    """One layer's MoE half.

    x        [T, C, D]       float
    routing  [T, K], [T, K]  int, float  ids and weights to use in place of the router's
    return: a dict of
    mixed, inject, logits, ids, weights, faults, gate, up, act, down, routed, shared_gate, shared, and
    out          [T, D]     float64  routed + shared
    out_streams  [T, C, D]  float64
    saturated    -          int

    A token that cannot be routed (`faults`) gets no routed experts; the others are as ever.

    >>> from expertile.layer_weights import example_weights
    >>> step = layer(np.ones((3, 2, 8)), example_weights())
    >>> step["out_streams"].shape, bool(np.allclose(step["out"], step["routed"] + step["shared"]))
    ((3, 2, 8), True)
    """
    read = hc_read(x, weights, operands)
    routed = route(read["mixed"], weights, operands)
    if routing is not None:
        routed["ids"], routed["weights"] = (np.asarray(array) for array in routing)
    chosen = experts(read["mixed"], routed["ids"], weights, operands)
    total = combine(routed["ids"], routed["weights"], chosen["down"])
    side = shared(read["mixed"], weights, operands)
    out = total + side["shared"]
    return {
        "mixed": read["mixed"],
        "inject": read["inject"],
        **routed,
        **{name: chosen[name] for name in ("gate", "up", "act", "down")},
        "routed": total,
        "shared_gate": side["shared_gate"],
        "shared": side["shared"],
        "out": out,
        "out_streams": hc_write(x, read["inject"], out),
        "saturated": read["saturated"] + chosen["saturated"] + side["saturated"],
    }


def prompt(x: npt.ArrayLike, layers: Iterable[LayerWeights], operands: Operands = "exact") -> Array:
    """The MoE halves of several layers, one after another.

    x       [T, C, D]  float
    layers  -          iterable of LayerWeights (a generator keeps one layer's weights at a time)
    return  [T, C, D]  float64

    >>> from expertile.layer_weights import example_weights
    >>> prompt(np.ones((3, 2, 8)), [example_weights(), example_weights(1)]).shape
    (3, 2, 8)
    """
    streams = np.asarray(x, dtype=np.float64)
    for weights in layers:
        streams = layer(streams, weights, operands)["out_streams"]
    return streams
