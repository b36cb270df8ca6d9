"""`expertile bench moe`: the routed experts of one layer, from `mixed` and the routing to the weighted sum.

The whole is plan, gather, gate, up, SwiGLU, down and combine, as one program: what ggml's mul_mat_id graph of the same
layer does too, since it sorts the tokens by expert itself. With `--formats`, one grouped GEMM of each type instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import expertile
from expertile import reference, report_json
from expertile.commands.bench_common import (
    SEED,
    Work,
    accuracy,
    add_options,
    add_peer,
    add_sizes,
    bench_routing,
    bench_sizes,
    measured_peak,
    on_host,
    open_peer,
    peer_fields,
    product_work,
    require,
    require_peer,
    rounds_for,
    sample,
    show_products,
    take_turns,
    thread_count,
    time_fields,
    write_csv,
)
from expertile.commands.common import (
    add_command,
    add_precision,
    finish,
    human_bytes,
    open_device,
    say,
    tile,
    word_list,
)
from expertile.commands.gemm_bench import run_formats
from expertile.commands.moe_parity import LastExpert
from expertile.commands.synth import expert_types
from expertile.layer_weights import LayerWeights
from expertile.peer.client import Peer
from expertile.quants import tensor_bytes
from expertile.synth import synthetic_model

DEFAULT_TOKENS = [1, 8, 32, 128, 512, 2048]
STEPS = ("plan", "gather", "experts", "combine")
PARTS = ("gate", "up", "down")
SMALL = {"shared_ffn": 32, "low_rank": 32}  # what the bench does not run
STEP_ROUNDS = 5
MEMORY_SLACK = 100e6
# Our kernels' names by group -> the parts that they compute, which are the peer's products to compare with.
COMPUTES = {
    "gate": ("gate",),
    "up": ("up",),
    "gate, up and activation": ("gate", "up"),
    "down": ("down",),
}


def add(stages: Any) -> None:
    parser = add_command(stages, "moe", run, "the routed experts of one layer, or one grouped GEMM a type")
    add_sizes(parser)
    add_options(parser, DEFAULT_TOKENS)
    add_precision(parser)
    add_peer(parser)
    parser.add_argument("--tile", type=tile, metavar="M,N,K,S", help="tile of gate and up")
    parser.add_argument("--dtile", type=tile, metavar="M,N,K,S", help="tile of down")
    parser.add_argument(
        "--fuse", type=word_list, default=[], metavar="LIST", help="one of swiglu, gatherless (default nothing)"
    )
    parser.add_argument("--formats", type=word_list, metavar="LIST", help="a grouped GEMM of each type: all, or a list")


def run(arguments: argparse.Namespace) -> int:
    sizes = bench_sizes(arguments)
    if arguments.formats is not None:
        return run_formats(arguments, sizes)
    return run_layer(arguments, sizes)


def run_layer(arguments: argparse.Namespace, sizes: dict[str, int]) -> int:
    """All T of one layer; the largest runs first, so that the peak of memory is that of the layer alone."""
    gate_up, down = expert_types(arguments)
    device = open_device(arguments.device, arguments.threads)
    changes: dict[str, Any] = {**SMALL, **sizes}
    fields, tensors = synthetic_model("tiny", 1, gate_up, down, arguments.seed, **changes)
    peer = open_peer(arguments)
    try:
        model = expertile.Model.from_tensors(fields, tensors)
        bench = Layer(arguments, sizes, model, device, peer)
        del tensors
        memory = bench.warm_up(max(arguments.tokens))
        bench.send_weights()
        rows: list[dict[str, Any]] = []
        for n_tokens in arguments.tokens:
            rows += bench.rows(n_tokens)
        top = {
            **memory,
            **sizes,
            "gu": gate_up,
            "dn": down,
            "threads": thread_count(arguments),
            "peak_flops": bench.peak,
        }
        if peer is not None:
            top |= {"peer_version": peer.version, "peer_features": peer.info["features"], "peer_buffers": bench.places}
    finally:
        if peer is not None:
            peer.close()
    show(rows, top, device)
    write_csv(arguments.csv, rows)
    return finish(arguments, "bench moe", True, rows, device, top)


class Layer:
    """One layer on our device, and maybe the same one in the peer."""

    def __init__(
        self, arguments: argparse.Namespace, sizes: dict[str, int], model: Any, device: Any, peer: Peer | None
    ) -> None:
        self.arguments, self.sizes, self.model, self.peer = arguments, sizes, model, peer
        tiles = {"gate_up": arguments.tile, "down": arguments.dtile}
        given = {name: chosen for name, chosen in tiles.items() if chosen is not None}
        if "combine" in arguments.fuse:
            raise ValueError("[--fuse] expected swiglu or gatherless, got combine: bench epilogue has it")
        most = max(arguments.tokens)
        self.window = expertile.Window(
            model, device=device, max_tokens=most, fuse=arguments.fuse, precision=arguments.precision, **given
        )
        self.tile_rows = (arguments.tile or (16,))[0]
        self.precision = arguments.precision
        self.peak = measured_peak(device, arguments)
        self.places: dict[str, str] = {}

    def weight(self, part: str) -> Any:
        return self.model.tensors[f"blk.0.ffn_{part}_exps.weight"]

    def send_weights(self) -> None:
        if self.peer is not None:
            for part in PARTS:
                self.places[part] = self.peer.add_weight(part, self.weight(part))

    def case(self, n_tokens: int) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]:
        """`mixed` [T, D], ids and weights [T, K]."""
        ids, weights = bench_routing(self.arguments.routing, n_tokens, self.sizes["n_experts"], self.sizes["top_k"])
        return np.random.default_rng(SEED).standard_normal((n_tokens, self.sizes["dim"]), np.float32), ids, weights

    def feed(self, mixed: NDArray[np.float32], ids: NDArray[np.int32], weights: NDArray[np.float32]) -> None:
        half = reference.to_half(mixed)[0]
        for name, array in (("mixed_half", half), ("ids", ids), ("weights", weights)):
            self.window._core.write(name, array)

    def time(self, n_tokens: int) -> float:
        """Seconds of the whole, as one program."""
        return float(self.window._core.time_steps(STEPS, 0, n_tokens, False, not on_host(self.window.device))[0][3])

    def time_parts(self, n_tokens: int) -> dict[str, float]:
        """Seconds by step, launch by launch; the plan's kernels together."""
        times: dict[str, float] = {}
        for name, step, _, seconds in self.window._core.time_steps(
            STEPS, 0, n_tokens, True, not on_host(self.window.device)
        ):
            label = {"expert_out": "down", "hidden": "activation"}.get(name, name) if step != "plan" else "plan"
            times[label] = times.get(label, 0.0) + float(seconds)
        return times

    def result(self, n_tokens: int) -> NDArray[np.float32]:
        y = np.empty((n_tokens, self.sizes["dim"]), np.float32)
        self.window._core.read("routed", y)
        return y

    def warm_up(self, n_tokens: int) -> dict[str, Any]:
        """One run of the largest chunk, and the peak of memory then: weights, the window's buffers, the rest."""
        self.feed(*self.case(n_tokens))
        self.time(n_tokens)
        peak = report_json.peak_rss_bytes()
        weights = sum(int(tensor.bytes) for tensor in self.model.tensors.values())
        window = self.window.memory()
        return {
            "peak_rss_bytes": peak,
            "weight_bytes": weights,
            "window_bytes": window,
            "memory_ok": peak <= weights + window + MEMORY_SLACK,
        }

    def rows(self, n_tokens: int) -> list[dict[str, Any]]:
        """The whole, then step by step; nothing is timed before its result is known to be right."""
        mixed, ids, weights = self.case(n_tokens)
        self.feed(mixed, ids, weights)
        seconds = self.time(n_tokens)
        y = self.result(n_tokens)
        at = sample(n_tokens, self.arguments.check_tokens)
        fp16, exact = layer_references(mixed[at], ids[at], weights[at], LayerWeights.from_model(self.model, 0))
        found: dict[str, Any] = {"check_tokens": len(at), **accuracy(y[at], fp16, exact)}
        where = f"bench moe T={n_tokens}"
        require(where, found, y, self.precision)
        if self.peer is not None:
            self.peer.request("layer", [mixed, ids, weights])
            seconds += self.peer.run()
            found |= require_peer(where, self.peer.result(), at, exact, y)
        rounds = rounds_for(self.arguments, seconds)
        return self.timed(n_tokens, ids, found, rounds)

    def timed(self, n_tokens: int, ids: NDArray[np.int32], found: dict[str, Any], rounds: int) -> list[dict[str, Any]]:
        runs: dict[str, Any] = {"ours": lambda: self.time(n_tokens)}
        parts: dict[str, Any] = {"ours": lambda: self.time_parts(n_tokens)}
        if self.peer is not None:
            run = self.peer.run
            runs["peer"] = run
            parts |= {part: lambda part=part: run(part) for part in PARTS}
            for part in PARTS:
                run(part)
        whole = take_turns(runs, rounds)
        steps = take_turns(parts, min(rounds, STEP_ROUNDS))
        work = self.work(ids)
        common = {
            "tokens": n_tokens,
            "device": self.window.device.kind,
            "routing": self.arguments.routing,
            "precision": self.precision,
            "rounds": rounds,
        }
        total = {**common, "step": "total", **time_fields(whole["ours"], sum(work.values(), Work()), self.peak)}
        if self.peer is not None:
            total |= peer_fields(total, f"ggml {self.peer.info['version']}", whole["peer"])
        rows = [{**total, **found}]
        for name in steps["ours"][0]:
            computes = COMPUTES.get(name, ())
            mine = sum((work[part] for part in computes), Work()) if computes else None
            row = {**common, "step": name, "format": self.formats(computes)}
            row |= time_fields([times[name] for times in steps["ours"]], mine, self.peak)
            if self.peer is not None and computes:
                theirs = [sum(turn) for turn in zip(*(steps[part] for part in computes), strict=True)]
                row |= peer_fields(row, f"ggml {self.peer.info['version']}", theirs)
            rows.append(row)
        return rows

    def formats(self, computes: Sequence[str]) -> str:
        return "+".join(dict.fromkeys(self.weight(part).type for part in computes)) or "-"

    def work(self, ids: NDArray[np.int32]) -> dict[str, Work]:
        """By product: real rows, rows padded to the plan's tiles, bytes of the experts that are used."""
        counts = np.bincount(ids.reshape(-1), minlength=self.sizes["n_experts"])
        padded = int((-(-counts // self.tile_rows) * self.tile_rows).sum())
        used = int(np.count_nonzero(counts))
        work = {}
        for part in PARTS:
            tensor = self.weight(part)
            n_inner, n_cols = int(tensor.shape[0]), int(tensor.shape[1])
            compressed = used * tensor_bytes(tensor.type, (n_inner, n_cols))
            work[part] = product_work(ids.size, padded, n_inner, n_cols, compressed)
        return work


def layer_references(mixed: Any, ids: Any, weights: Any, layer: LayerWeights) -> tuple[Any, Any]:
    """y of some tokens with fp16 operands, and exact; every expert is decoded once."""
    keep = LastExpert(layer.tensors, layer.layer, layer.top_k, layer.eps)
    modes: tuple[reference.Operands, ...] = ("fp16", "exact")
    down = {mode: np.zeros((*ids.shape, layer.dim)) for mode in modes}
    for expert in np.unique(ids).tolist():
        at = np.nonzero(ids == expert)
        for mode in modes:
            one = reference.experts(mixed[at[0]], np.full((len(at[0]), 1), expert), keep, mode)
            down[mode][at] = one["down"][:, 0]
    return reference.combine(ids, weights, down["fp16"]), reference.combine(ids, weights, down["exact"])


def show(rows: list[dict[str, Any]], top: dict[str, Any], device: Any) -> None:
    totals = [row for row in rows if row["step"] == "total"]
    say(
        f"{device.name}, {top['threads']} threads; E={top['n_experts']} D={top['dim']} F={top['expert_ffn']} "
        f"K={top['top_k']}, gate and up {top['gu']}, down {top['dn']}, {rows[0]['routing']} routing"
    )
    if top["peak_flops"]:
        say(f"fp32 multiply-add peak, measured now: {top['peak_flops'] / 1e9:.0f} GFLOP/s")
    if "peer_version" in top:
        places = ", ".join(f"{part} in {place}" for part, place in top["peer_buffers"].items())
        say(f"peer: {top['peer_version']} ({' '.join(top['peer_features'])}); {places}; ratio = its time over ours")
    counts = sorted({row["check_tokens"] for row in totals})
    title = f"the layer's experts, {rows[0]['precision']}; error: relative L2 to the exact reference on "
    show_products(totals, {"tokens": "T"}, title + f"{'-'.join(map(str, counts))} tokens")
    show_products(
        [row for row in rows if row["step"] != "total"],
        {"tokens": "T", "step": "step", "format": "type"},
        "\nstep by step",
    )
    allowed = top["weight_bytes"] + top["window_bytes"] + MEMORY_SLACK
    say(
        f"\npeak memory {human_bytes(top['peak_rss_bytes'])}, allowed {human_bytes(allowed)}: weights "
        f"{human_bytes(top['weight_bytes'])}, window {human_bytes(top['window_bytes'])} for T = "
        f"{max(row['tokens'] for row in rows)}, {human_bytes(MEMORY_SLACK)} for all else"
        f"{'' if top['memory_ok'] else ': TOO MUCH'}"
    )
