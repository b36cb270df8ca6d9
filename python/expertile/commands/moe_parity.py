"""`expertile parity moe`: the plan, the gather and the routed experts of a layer.

Plan, gather and combine are compared byte for byte. Each GEMM is compared with the reference's product of the very
operands that it was given, entry by entry: down with the activations that the device made, since an activation that
lies between two halves may be rounded to either. `y`, from `mixed` to the weighted sum, is compared as a whole.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import expertile
from expertile import measure, reference
from expertile.commands.common import finish, random_routing, say
from expertile.commands.layer_parity import BF16_BOUND, EXACT_BOUND, FP16_BOUND, SEED, devices_for, gemm_row, verdict
from expertile.commands.plan_parity import Routing, byte_difference, differing_bytes, plan_reference
from expertile.commands.synth import synthetic
from expertile.layer_weights import LayerWeights

Arrays = dict[str, NDArray[Any]]


@dataclass
class Run:
    """What one device made of T tokens; entries [T, K, ...] that are skipped hold zeros."""

    n_tokens: int
    device: str
    precision: str
    entries: Arrays  # gate, up, hidden, down
    y: NDArray[np.float32]
    differing: dict[str, int]


class LastExpert(LayerWeights):
    """Weights that keep the matrices of the expert used last, so that every reference decodes it once."""

    def expert(self, part: Any, expert: int) -> NDArray[np.float64]:
        kept: dict[Any, Any] = self.__dict__.setdefault("kept", {})
        if (part, expert) not in kept:
            for key in [key for key in kept if key[1] != expert]:
                del kept[key]
            kept[part, expert] = super().expert(part, expert)
        matrix: NDArray[np.float64] = kept[part, expert]
        return matrix


def run_moe(arguments: argparse.Namespace) -> int:
    """Runs all T on all devices, then goes through the experts once for all of them."""
    model = synthetic(arguments.preset, layers=1, gu=arguments.gu, dn=arguments.dn, seed=SEED)
    tiles = {"gate_up": arguments.tile, "down": arguments.dtile}
    given = {name: chosen for name, chosen in tiles.items() if chosen is not None}
    windows = [
        expertile.Window(model, device=device, max_tokens=max(arguments.tokens), precision=arguments.precision, **given)
        for device in devices_for(arguments)
    ]
    tile_rows = (arguments.tile or (16,))[0]
    rows: list[dict[str, Any]] = []
    cases = [inputs(n_tokens, model.config) for n_tokens in arguments.tokens]
    runs = [[run_device(window, mixed, routing, tile_rows) for window in windows] for mixed, routing in cases]
    wanted = expert_references(cases, runs, LayerWeights.from_model(model, 0))
    for (_, routing), of_case, want in zip(cases, runs, wanted, strict=True):
        for index, run in enumerate(of_case):
            row = moe_row(run, routing, want, want[f"down {index}"])
            rows.append(row)
            show(row)
    top = {"gu": arguments.gu or "IQ2_XS", "dn": arguments.dn or "IQ4_NL", "preset": arguments.preset}
    return finish(arguments, "parity moe", all(row["ok"] for row in rows), rows, windows[0].device, top)


def inputs(n_tokens: int, config: Any) -> tuple[NDArray[np.float32], Routing]:
    """`mixed` and a routing with every seventh entry skipped."""
    ids, weights = random_routing(n_tokens, config.n_experts, config.top_k, SEED)
    ids.reshape(-1)[::7] = -1
    return np.random.default_rng([SEED, n_tokens]).standard_normal((n_tokens, config.dim), np.float32), (ids, weights)


def run_device(window: Any, mixed: NDArray[np.float32], routing: Routing, tile_rows: int) -> Run:
    """Each step is fed the reference's arrays, so that a fault shows where it is."""
    ids, weights = routing
    expected = plan_reference(ids, weights, window.config.n_experts, tile_rows)
    plan = window.plan(ids, weights)
    # The window's own column tiles are in meta 8 and 11: the two grids are not compared here.
    expected["meta"] = np.concatenate([expected["meta"][:8], plan["meta"][8:]])
    differing = differing_bytes(plan, expected)
    half, _ = reference.to_half(mixed)
    rows = reference.gather(half, expected["row_token"])
    differing["rows_fp16"] = byte_difference(window.gather(expected, half), rows)
    made = window.experts(0, expected, rows)
    y = window.combine(expected, made["expert_out"])
    position = expected["position"].reshape(ids.shape)
    summed = reference.combine_fp32(position, expected["row_weight"], made["expert_out"])
    differing["combine"] = int(np.count_nonzero(measure.differing(y, summed))) * 4
    names = {"gate": "gate", "up": "up", "hidden": "hidden", "down": "expert_out"}
    entries = {}
    for name, source in names.items():
        entries[name] = np.zeros((*ids.shape, made[source].shape[1]), made[source].dtype)
        entries[name][ids >= 0] = made[source][position[ids >= 0]]
    return Run(len(ids), window.device.kind, window.precision, entries, y, differing)


def expert_references(cases: list[Any], runs: list[list[Run]], weights: LayerWeights) -> list[Arrays]:
    """For each case: gate, up, down as "fp16 NAME" and "exact NAME", and "down I" from what device I gave to down.

    Decoding the experts is most of the work, so each is decoded once, for the entries of all cases together.
    """
    keep = LastExpert(weights.tensors, weights.layer, weights.top_k, weights.eps)
    mixed = np.concatenate([case[0] for case in cases])
    ids = np.concatenate([case[1][0] for case in cases])
    n_devices = len(runs[0])
    hidden = [np.concatenate([of_case[index].entries["hidden"] for of_case in runs]) for index in range(n_devices)]
    out: Arrays = {}

    def put(name: str, at: Any, values: NDArray[Any]) -> None:
        out.setdefault(name, np.zeros((*ids.shape, values.shape[1])))[at] = values

    modes: tuple[reference.Operands, ...] = ("fp16", "exact")
    for expert in np.unique(ids[ids >= 0]).tolist():
        at = np.nonzero(ids == expert)
        for operands in modes:
            part = reference.experts(mixed[at[0]], np.full((len(at[0]), 1), expert), keep, operands)
            for name in ("gate", "up", "down"):
                put(f"{operands} {name}", at, part[name][:, 0])
        scale = keep.scale("ffn_down_exps", expert)
        for index in range(n_devices):
            put(f"down {index}", at, reference.product(hidden[index][at], keep.expert("down", expert), "fp16", scale))
    ends = np.cumsum([len(case[0]) for case in cases])
    return [
        {name: array[end - len(case[0]) : end] for name, array in out.items()}
        for case, end in zip(cases, ends, strict=True)
    ]


def moe_row(run: Run, routing: Routing, want: Arrays, fed_down: NDArray[Any]) -> dict[str, Any]:
    """One line: y as a whole; and the worst entry of each GEMM, on the operands that it was given."""
    ids, weights = routing
    kept = ids >= 0
    gemms = {
        name: gemm_row(run.entries[name][kept], want[f"fp16 {name}"][kept], want[f"exact {name}"][kept], run.precision)
        for name in ("gate", "up")
    }
    worst_down, _ = measure.worst_token_rel_l2(run.entries["down"][kept], fed_down[kept])
    made = reference.silu(run.entries["gate"][kept]) * run.entries["up"][kept].astype(np.float64)
    ulps = measure.half_ulp_distance(run.entries["hidden"][kept], reference.to_half(made)[0])
    row: dict[str, Any] = {"tokens": run.n_tokens, "device": run.device, "precision": run.precision}
    row["against"] = "reference"
    for mode in ("fp16", "exact"):
        row[f"rel_l2_{mode}"] = measure.rel_l2(run.y, reference.combine(ids, weights, want[f"{mode} down"]))
    row["worst_gate"], row["worst_up"], row["worst_down"] = (
        gemms["gate"]["rel_l2_fp16"],
        gemms["up"]["rel_l2_fp16"],
        worst_down,
    )
    row["hidden_ulps"] = int(ulps.max(initial=0))
    row["differing_bytes"] = sum(run.differing.values())
    row["differing"] = run.differing
    exact = run.precision == "exact"
    row["ok"] = bool(
        row["differing_bytes"] == 0
        and all(gemm["ok"] for gemm in gemms.values())
        and worst_down <= (FP16_BOUND if exact else BF16_BOUND)
        and row["hidden_ulps"] <= 1
        and (not exact or row["rel_l2_fp16"] <= FP16_BOUND)
        and row["rel_l2_exact"] <= (EXACT_BOUND if exact else BF16_BOUND)
    )
    return row


def show(row: dict[str, Any]) -> None:
    wrong = [f"{name} ({count} bytes)" for name, count in row["differing"].items() if count]
    say(
        f"{row['device']} {row['precision']} T={row['tokens']}: "
        f"plan {'WRONG: ' + ', '.join(wrong) if wrong else 'ok'}; "
        f"y vs fp16-operand reference rel L2 {row['rel_l2_fp16']:.2e}, "
        f"vs exact float reference {row['rel_l2_exact']:.2e} {verdict(row['ok'])}"
    )
    say(
        f"  worst entry: gate {row['worst_gate']:.2e}, up {row['worst_up']:.2e}, down {row['worst_down']:.2e}; "
        f"activations within {row['hidden_ulps']} ulp"
    )
