"""A layer's MoE half written a second time: token by token, one formula a line; and written wrong on purpose."""

from __future__ import annotations

from math import exp

import numpy as np
import numpy.typing as npt

from expertile.layer_weights import Array, LayerWeights

# Every one must move the result: else the comparison with the captured arrays could not see the mistake.
WRONG_VARIANTS = (
    "no division before silu",
    "division after silu",
    "sum of streams instead of mean",
    "stream gate without sigmoid",
    "one norm over all streams",
    "gamma plus one",
    "inject without division",
    "inject scale one",
    "inject scale four",
    "out into the first stream only",
    "weights not renormalised",
    "weights in reversed slots",
    "one expert too few",
    "swapped gate and up",
    "silu of the product",
    "silu left out",
    "quick gelu",
    "shared gate without sigmoid",
    "no shared expert",
    "eps outside the root",
    "no eps",
    "ties to the highest id",
)


def _sigmoid(v: float) -> float:
    return 1.0 / (1.0 + exp(-v))


def _each(function, values: Array) -> Array:
    return np.array([function(float(v)) for v in values.reshape(-1)]).reshape(values.shape)


def naive_layer(x: npt.ArrayLike, w: LayerWeights, wrong: str = "") -> dict[str, Array]:
    """out [T, D] and out_streams [T, C, D] in float64."""
    streams = np.asarray(x, dtype=np.float64)
    results = [_token(token, w, wrong) for token in streams]
    return {"out": np.array([r[0] for r in results]), "out_streams": np.array([r[1] for r in results])}


def _token(x: Array, w: LayerWeights, wrong: str) -> tuple[Array, Array]:
    n_streams, dim = x.shape
    xn = _norm(x, w, wrong)
    hidden = w.matrix("hc_ffn_down") @ xn.reshape(-1)
    if wrong != "no division before silu" and wrong != "division after silu":
        hidden = hidden / n_streams
    lo = _silu(hidden, wrong)
    if wrong == "division after silu":
        lo = lo / n_streams
    gate = (w.matrix("hc_ffn_up") @ lo).reshape(n_streams, dim)
    opened = gate if wrong == "stream gate without sigmoid" else _each(_sigmoid, gate)
    mixed = sum(xn[c] * opened[c] for c in range(n_streams))
    if wrong != "sum of streams instead of mean":
        mixed = mixed / n_streams
    out = _routed(mixed, w, wrong)
    if wrong != "no shared expert":
        out = out + _shared(mixed, w, wrong)
    inject = w.matrix("hc_ffn_inject") @ xn.reshape(-1)
    if wrong != "inject without division":
        inject = inject / n_streams
    factor = {"inject scale one": 1.0, "inject scale four": 4.0}.get(wrong, 2.0)
    written = x.copy()
    for c in range(1 if wrong == "out into the first stream only" else n_streams):
        written[c] = x[c] + factor * _sigmoid(inject[c]) * out
    return out, written


def _norm(x: Array, w: LayerWeights, wrong: str) -> Array:
    gamma = w.matrix("hc_ffn_norm").reshape(x.shape) + (1.0 if wrong == "gamma plus one" else 0.0)
    square = np.array([float(stream @ stream) / len(stream) for stream in x])
    if wrong == "one norm over all streams":
        square = np.full(len(x), square.mean())
    root = np.sqrt(square + w.eps)
    if wrong == "eps outside the root":
        root = np.sqrt(square) + w.eps
    if wrong == "no eps":
        root = np.sqrt(square)
    return x / root[:, None] * gamma


def _silu(values: Array, wrong: str) -> Array:
    slope = 1.702 if wrong == "quick gelu" else 1.0
    return values if wrong == "silu left out" else _each(lambda v: v * _sigmoid(slope * v), values)


def _feed_forward(x: Array, gate: Array, up: Array, down: Array, factors: tuple[float, ...], wrong: str) -> Array:
    g, u = factors[0] * (gate @ x), factors[1] * (up @ x)
    if wrong == "swapped gate and up":
        g, u = u, g
    return factors[2] * (down @ (_silu(g * u, wrong) if wrong == "silu of the product" else _silu(g, wrong) * u))


def _routed(x: Array, w: LayerWeights, wrong: str) -> Array:
    logits = w.matrix("ffn_gate_inp") @ x
    # Choice on fp32 logits: equal rows of the router give equal logits.
    keys = logits.astype(np.float32)
    high = wrong == "ties to the highest id"
    chosen = sorted(range(len(keys)), key=lambda e: (-keys[e], -e if high else e))[: w.top_k]
    if wrong == "one expert too few":
        chosen = chosen[:-1]
    odds = [exp(logits[e] - logits.max()) for e in chosen]
    whole = sum(_each(exp, logits - logits.max())) if wrong == "weights not renormalised" else sum(odds)
    if wrong == "weights in reversed slots":
        odds.reverse()
    total = np.zeros(len(x))
    for e, odd in zip(chosen, odds, strict=True):
        factors = tuple(w.scale(f"ffn_{part}_exps", e) for part in ("gate", "up", "down"))
        matrices = w.expert("gate", e), w.expert("up", e), w.expert("down", e)
        total += odd / whole * _feed_forward(x, *matrices, factors, wrong)
    return total


def _shared(x: Array, w: LayerWeights, wrong: str) -> Array:
    parts = [f"ffn_{part}_shexp" for part in ("gate", "up", "down")]
    y = _feed_forward(x, *(w.matrix(part) for part in parts), tuple(w.scale(part) for part in parts), wrong)
    logit = float(w.matrix("ffn_gate_inp_shexp")[0] @ x)
    return (logit if wrong == "shared gate without sigmoid" else _sigmoid(logit)) * y
