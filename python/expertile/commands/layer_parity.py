"""`expertile parity dense, prompt`: the stages that have bounds rather than bits. `moe_parity` has the experts.

GEMM, worst token  relative L2 <= 5e-5 to the fp16-operand reference (or as near to the exact one),
                   and <= 1e-3 to the exact one; with precision bf16, <= 4e-3 to the exact one
elementwise, fp32  2e-6 relative; route weights 1e-6; ids exact outside near ties
"""

from __future__ import annotations

import argparse
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

import expertile
from expertile import _core, measure, quants, reference
from expertile.commands.common import (
    finish,
    open_device,
    present_kinds,
    show_table,
)
from expertile.commands.synth import synthetic
from expertile.layer_weights import LayerWeights
from expertile.synth import synthetic_model

FP16_BOUND = 5e-5
EXACT_BOUND = 1e-3
BF16_BOUND = 4e-3
ELEMENT_BOUND = 2e-6
SEED = 0

# --- what has bounds --------------------------------------------------------------------------------------------


def gemm_row(got: Any, fp16: Any, exact: Any, precision: str = "exact") -> dict[str, Any]:
    """The worst token's distances to both references, and whether they are within the precision's bounds."""
    to_fp16, token = measure.worst_token_rel_l2(got, fp16)
    to_exact, _ = measure.worst_token_rel_l2(got, exact)
    if precision == "bf16":
        ok = to_exact <= BF16_BOUND
    else:
        ok = (to_fp16 <= FP16_BOUND or to_exact <= FP16_BOUND) and to_exact <= EXACT_BOUND
    return {"rel_l2_fp16": to_fp16, "rel_l2_exact": to_exact, "worst_token": token, "ok": bool(ok)}


def element_row(got: Any, want: Any, size: Any, bound: float) -> dict[str, Any]:
    """The largest difference relative to `size`, and whether it is within `bound`.

    size: the sum of the terms' absolute values, for a sum whose terms may cancel.
    """
    a, b = np.asarray(got, np.float64), np.asarray(want, np.float64)
    worst = float(np.max(np.abs(a - b) / np.maximum(size, 1e-30), initial=0.0))
    return {"max_relative": worst, "ok": bool(worst <= bound)}


def verdict(ok: bool) -> str:
    return "PASS" if ok else "FAIL"


def devices_for(arguments: argparse.Namespace) -> list[Any]:
    """All present for the tiny sizes; for full ones the best: an emulated GPU would take hours."""
    if arguments.preset == "tiny":
        return [open_device(kind) for kind in present_kinds(arguments.device)]
    return [open_device(arguments.device)]


# --- dense ------------------------------------------------------------------------------------------------------


def run_dense(arguments: argparse.Namespace) -> int:
    """y = W x for random W of every type, with every tile."""
    kernels = _core.kernels()
    formats = {name: row[0] for name, row in _core.types().items()}
    tiles = [arguments.tile] if arguments.tile else [tuple(entry) for entry in _core.tiles()]
    chosen = arguments.formats or [name for name in formats if dense_kernel(formats[name], tiles[0]) in kernels]
    for name in chosen:
        for size in tiles:
            if name not in formats or dense_kernel(formats[name], size) not in kernels:
                known = [known for known, suffix in formats.items() if dense_kernel(suffix, size) in kernels]
                text = ",".join(map(str, size))
                raise ValueError(f"[parity dense] expected one of {', '.join(known)} for tile {text}, got {name}")
    rows = []
    for kind in present_kinds(arguments.device):
        device = open_device(kind)
        for name in chosen:
            for n_tokens in arguments.tokens:
                for size in tiles:
                    row = dense_row(device, name, formats[name], n_tokens, size, SEED, arguments.precision)
                    rows.append({"device": kind, "against": "reference", "format": name, "tokens": n_tokens, **row})
    show_table(
        ["type", "device", "T", "tile", "vs fp16 operands", "vs exact", ""],
        [
            [
                row["format"],
                row["device"],
                row["tokens"],
                row["tile"],
                f"{row['rel_l2_fp16']:.2e}",
                f"{row['rel_l2_exact']:.2e}",
                verdict(row["ok"]),
            ]
            for row in rows
        ],
        f"relative L2 of the worst token, precision {arguments.precision}",
    )
    return finish(arguments, "parity dense", all(row["ok"] for row in rows), rows)


def dense_kernel(suffix: str, size: Any) -> str:
    return f"gemm_dense_{suffix}_" + "_".join(map(str, size))


def dense_row(
    device: Any, name: str, suffix: str, n_tokens: int, size: Any, seed: int, precision: str
) -> dict[str, Any]:
    """One GEMM of odd sizes, its output poisoned with NaN."""
    n_cols, n_inner = 72, 512
    generator = np.random.default_rng([seed, n_tokens])
    # A layer whose shared gate is the matrix wanted: dim columns by shared_ffn rows.
    types = {"ffn_gate_shexp": name}
    _, tensors = synthetic_model("tiny", seed=seed, types=types, dim=n_inner, shared_ffn=n_cols)
    weight = tensors["blk.0.ffn_gate_shexp.weight"].data
    matrix = quants.dequantize(weight, name, (n_inner, n_cols)).astype(np.float64)
    x = generator.standard_normal((n_tokens, n_inner)).astype(np.float32)
    y = np.full((n_tokens, n_cols), np.nan, np.float32)
    packed = struct.pack("<IIIfQ", n_tokens, n_cols, n_inner, 1.0, quants.tensor_bytes(name, (n_inner,)))
    grid = [-(-n_cols // size[1]), -(-n_tokens // size[0]), 1]
    _core.run_kernel(device, dense_kernel(suffix, size), packed, [reference.to_half(x)[0], weight, y], grid, precision)
    row = gemm_row(y, reference.product(x, matrix, "fp16"), reference.product(x, matrix, "exact"), precision)
    return {"tile": ",".join(map(str, size)), "precision": precision, **row}


# --- prompt -----------------------------------------------------------------------------------------------------


def run_prompt(arguments: argparse.Namespace) -> int:
    """The dense parts of a layer, each fed the reference's arrays."""
    model = synthetic(arguments.preset, layers=1, seed=SEED)
    weights = LayerWeights.from_model(model, 0)
    rows: list[dict[str, Any]] = []
    for device in devices_for(arguments):
        window = expertile.Window(model, device=device, max_tokens=max(arguments.tokens))
        for n_tokens in arguments.tokens:
            shape = (n_tokens, model.config.n_streams, model.config.dim)
            x = np.random.default_rng([SEED, n_tokens]).standard_normal(shape, np.float32)
            common = {"device": device.kind, "against": "reference", "tokens": n_tokens}
            rows += [{**common, **row} for row in prompt_rows(window, weights, x)]
    show_table(
        ["step", "device", "T", "what", ""],
        [[row["step"], row["device"], row["tokens"], row["text"], verdict(row["ok"])] for row in rows],
    )
    return finish(arguments, "parity prompt", all(row["ok"] for row in rows), rows)


def prompt_rows(window: Any, weights: Any, x: NDArray[np.float32]) -> Iterator[dict[str, Any]]:
    """hc_read, route, shared and hc_write of one layer."""
    fp16, exact = (reference.hc_read(x, weights, operands) for operands in ("fp16", "exact"))
    read = window.hc_read(0, x)
    for name in ("mixed", "inject"):
        yield with_text({"step": "hc_read", "array": name, **gemm_row(read[name], fp16[name], exact[name])})
    mixed = fp16["mixed"].astype(np.float32)
    want = reference.route(mixed, weights, "fp16")
    got = window.route(0, mixed)
    yield route_row(got, want)
    shared16, shared_exact = (reference.shared(mixed, weights, operands) for operands in ("fp16", "exact"))
    yield from shared_rows(window.shared(0, mixed), shared16, shared_exact, weights)
    routed = np.random.default_rng(len(x)).standard_normal(mixed.shape, np.float32)
    side = shared16["down"].astype(np.float32)
    gate = shared16["gate_logit"].astype(np.float32)
    inject = fp16["inject"].astype(np.float32)
    wrote = window.hc_write(x, routed, side, gate, inject)
    total = routed.astype(np.float64) + reference.sigmoid(gate)[:, None] * side
    want_streams = reference.hc_write(x, inject, total)
    row = element_row(wrote, want_streams, np.abs(x) + np.abs(want_streams - x), ELEMENT_BOUND)
    yield {
        "step": "moe_out",
        "array": "streams",
        **row,
        "text": f"largest relative difference {row['max_relative']:.2e}",
    }


def shared_rows(part: Any, fp16: Any, exact: Any, weights: LayerWeights) -> Iterator[dict[str, Any]]:
    """Gate and up; then what the device makes of its own gate and up, and of its own hidden halves.

    A hidden value half a unit from the reference's may round to the neighbouring half: in a down GEMM of few inner
    values that alone is more than the GEMM's bound.
    """
    for name in ("gate", "up"):
        yield with_text({"step": "shared", "array": name, **gemm_row(part[f"shared_{name}"], fp16[name], exact[name])})
    hidden = part["shared_hidden"]
    gate, up = (part[f"shared_{name}"].astype(np.float64) for name in ("gate", "up"))
    ulp = int(np.max(measure.half_ulp_distance(hidden, reference.to_half(reference.silu(gate) * up)[0]), initial=0))
    text = f"hidden: at most {ulp} units in the last place"
    yield {"step": "shared", "array": "hidden", "half_ulp": ulp, "ok": ulp <= 1, "text": text}
    matrix, scale = weights.matrix("ffn_down_shexp"), weights.scale("ffn_down_shexp")
    near = reference.product(hidden, matrix, "fp16", scale)
    far = reference.product(hidden, matrix, "exact", scale)
    yield with_text({"step": "shared", "array": "ys", **gemm_row(part["shared_out"], near, far)})


def with_text(row: dict[str, Any]) -> dict[str, Any]:
    text = f"{row['array']}: vs fp16-operand reference {row['rel_l2_fp16']:.2e}, vs exact {row['rel_l2_exact']:.2e}"
    return {**row, "text": text}


def route_row(got: dict[str, Any], want: dict[str, Any]) -> dict[str, Any]:
    """Ids exact outside near ties; weights compared for the tokens whose ids agree."""
    ids = measure.compare_ids(got["ids"], want["ids"], want["logits"], 1e-5)
    same = (got["ids"] == want["ids"]).all(axis=1)
    worst = float(np.max(np.abs(got["weights"][same] - want["weights"][same]), initial=0.0))
    return {
        "step": "route_topk",
        "array": "ids, weights",
        "wrong": ids.wrong,
        "swaps": ids.swaps,
        "max_difference": worst,
        "ok": ids.ok and worst <= 1e-6,
        "text": f"{ids.wrong} tokens with wrong ids, {ids.swaps} swaps of near ties, weights within {worst:.2e}",
    }
