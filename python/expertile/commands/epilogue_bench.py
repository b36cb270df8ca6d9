"""`expertile bench epilogue`: every step that has more than one form, each form beside the others, the fastest named.

The forms give the same bits, where a device has native forms of all; where it emulates one, exp may round otherwise.
Either is checked before the clock starts: nothing is timed that is further off than ELEMENT_BOUND. Times are medians
a layer, over a program of `--layers` layers. Sizes are those of `bench moe`; the shared expert's weights are Q8_0.
"""

from __future__ import annotations

import argparse
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expertile import _core, measure, quants
from expertile.commands.bench_common import (
    SEED,
    add_options,
    add_sizes,
    bench_routing,
    bench_sizes,
    on_host,
    rounds_for,
    take_turns,
    thread_count,
    time_calls,
    write_csv,
)
from expertile.commands.common import (
    CheckFailed,
    add_command,
    finish,
    not_negative,
    open_device,
    show_table,
    spread,
    tile,
    word_list,
)
from expertile.commands.gemm_bench import DEFAULT_TILE, Tile, dense_tile
from expertile.commands.layer_parity import ELEMENT_BOUND
from expertile.commands.plan_parity import byte_difference, plan_reference
from expertile.synth import random_tensor

DEFAULT_TOKENS = [128, 512, 2048]
LAYERS = 48
SHARED_TYPE = "Q8_0"
N_STREAMS = 4
CHUNK = 256  # columns that one threadgroup of an elementwise kernel handles
Array = NDArray[Any]
Call = tuple[str, bytes, list[Any], tuple[int, int, int]]


@dataclass
class Form:
    """One way to compute a step: its kernels in order, and the buffer that holds the result."""

    name: str
    calls: list[Call]
    output: Any


@dataclass
class Step:
    """A step of several forms. `rows`: those of the result that count, None for all."""

    name: str
    forms: list[Form]
    shape: tuple[int, ...]
    dtype: Any
    rows: Array | None = None
    heavy: bool = False  # has GEMMs: one layer a sample is long enough for the clock


def add(stages: Any) -> None:
    parser = add_command(stages, "epilogue", run, "every step that has more than one form")
    add_sizes(parser)
    add_options(parser, DEFAULT_TOKENS)
    parser.add_argument("--tile", type=tile, default=DEFAULT_TILE, metavar="M,N,K,S", help="tile of gate and up")
    parser.add_argument("--steps", type=word_list, metavar="LIST", help=f"some of {', '.join(MAKERS)} (default all)")
    parser.add_argument(
        "--layers",
        type=not_negative,
        default=0,
        metavar="N",
        help="layers in a sample (default 48; 1 with GEMMs on cpu)",
    )


def run(arguments: argparse.Namespace) -> int:
    chosen = arguments.steps or list(MAKERS)
    for name in chosen:
        if name not in MAKERS:
            raise ValueError(f"[--steps] expected some of {', '.join(MAKERS)}, got {name}")
    device = open_device(arguments.device, arguments.threads)
    layer = Layer(device, arguments)
    rows: list[dict[str, Any]] = []
    for n_tokens in arguments.tokens:
        layer.plan(n_tokens)
        for name in chosen:
            rows += step_rows(layer, MAKERS[name](layer))
    show(rows)
    write_csv(arguments.csv, rows)
    top = {**layer.sizes, "threads": thread_count(arguments), "gu": layer.gate_type}
    return finish(arguments, "bench epilogue", True, rows, device, top)


class Layer:
    """Buffers of a layer, made when they are first asked for and kept while T stays the same."""

    def __init__(self, device: Any, arguments: argparse.Namespace) -> None:
        self.device, self.arguments = device, arguments
        self.sizes = bench_sizes(arguments)
        self.gate_type = (arguments.gu or "IQ2_XS").upper()
        self.tile: Tile = arguments.tile
        self.kept: dict[str, Any] = {}
        self.weights: dict[str, Any] = {}
        self.n_tokens = 0

    def plan(self, n_tokens: int) -> None:
        self.kept = {}
        self.n_tokens = n_tokens
        ids, weights = bench_routing(self.arguments.routing, n_tokens, self.sizes["n_experts"], self.sizes["top_k"])
        arrays = plan_reference(ids, weights, self.sizes["n_experts"], self.tile[0])
        self.row_token = arrays["row_token"]
        for name in ("meta", "tiles", "row_token", "row_weight", "position"):
            self.kept[name] = self.device.upload(arrays[name])
        self.n_rows, self.n_tiles = len(self.row_token), len(arrays["tiles"])

    def values(self, name: str, *shape: int, half: bool = False) -> Any:
        """Random numbers; the same for the same name and shape."""
        if name not in self.kept:
            values = np.random.default_rng([SEED, *name.encode()]).standard_normal(shape, np.float32)
            self.kept[name] = self.device.upload(values.astype(np.float16) if half else values)
        return self.kept[name]

    def room(self, name: str, bytes_: int) -> Any:
        if name not in self.kept:
            self.kept[name] = self.device.alloc(bytes_)
        return self.kept[name]

    def saturated(self) -> Any:
        if "saturated" not in self.kept:
            self.kept["saturated"] = self.device.upload(np.zeros(1, np.uint64))
        return self.kept["saturated"]

    def weight(self, name: str, type_name: str, *shape: int) -> Any:
        if name not in self.weights:
            self.weights[name] = self.device.upload(random_tensor(name, type_name, shape, SEED).data)
        return self.weights[name]

    def experts(self, name: str) -> tuple[Any, Any]:
        """The table of one matrix an expert, and its scales."""
        sizes = self.sizes
        shape = (sizes["dim"], sizes["expert_ffn"], sizes["n_experts"])
        weight = self.weight(name, self.gate_type, *shape)
        if f"{name} table" not in self.weights:
            one = quants.tensor_bytes(self.gate_type, shape[:2])
            table = weight.address + np.arange(shape[2], dtype=np.uint64) * np.uint64(one)
            self.weights[f"{name} table"] = self.device.upload(table)
            self.weights[f"{name} scales"] = self.device.upload(np.ones(shape[2], np.float32))
        return self.weights[f"{name} table"], self.weights[f"{name} scales"]

    def suffix(self, type_name: str, size: Tile) -> str:
        return f"{_core.types()[type_name][0]}_" + "_".join(map(str, size))

    def by_row(self, kernel: str, args: bytes, buffers: list[Any]) -> Call:
        return kernel, args, buffers, (self.n_rows, 1, 1)

    def by_token(self, kernel: str, args: bytes, buffers: list[Any], n_cols: int) -> Call:
        return kernel, args, buffers, (-(-n_cols // CHUNK), self.n_tokens, 1)

    def grouped(self, name: str, rows: list[Any], into: Any, ending: str = "") -> Call:
        """gate or up; `rows` are the gathered rows, or the tokens' rows and row_token."""
        dim, ffn = self.sizes["dim"], self.sizes["expert_ffn"]
        args = struct.pack("<IIIfQ", 0, ffn, dim, 1.0, quants.tensor_bytes(self.gate_type, (dim,)))
        table, scales = self.experts(name)
        buffers = [*rows, table, scales, self.kept["tiles"], self.kept["meta"], into]
        grid = (-(-ffn // self.tile[1]), self.n_tiles, 1)
        return f"gemm_grouped_{self.suffix(self.gate_type, self.tile)}{ending}", args, buffers, grid

    def gather(self) -> Call:
        dim = self.sizes["dim"]
        mixed = self.values("mixed", self.n_tokens, dim, half=True)
        rows = self.room("rows", self.n_rows * dim * 2)
        return self.by_row("mm_gather_h", struct.pack("<I", dim), [*self.keep("meta", "row_token"), mixed, rows])

    def keep(self, *names: str) -> list[Any]:
        return [self.kept[name] for name in names]


def element_args(n_rows: int, n_cols: int) -> bytes:
    return struct.pack("<IIfI", n_rows, n_cols, 1.0, 0)


# --- the steps --------------------------------------------------------------------------------------------------


def swiglu(layer: Layer) -> Step:
    """The shared expert's activation."""
    n_tokens, ffn = layer.n_tokens, layer.sizes["expert_ffn"]
    inputs = [layer.values(name, n_tokens, ffn) for name in ("shared gate", "shared up")]
    forms = []
    for kernel in ("swiglu_h", "swiglu_h_v4"):
        into = layer.room(f"hidden {kernel}", n_tokens * ffn * 2)
        buffers = [*inputs, into, layer.saturated()]
        forms.append(Form(kernel, [layer.by_token(kernel, element_args(n_tokens, ffn), buffers, ffn)], into))
    return Step("swiglu_h", forms, (n_tokens, ffn), np.float16)


def act(layer: Layer) -> Step:
    """The experts' activation."""
    n_rows, ffn = layer.n_rows, layer.sizes["expert_ffn"]
    inputs = [layer.values(name, n_rows, ffn) for name in ("gate", "up")]
    forms = []
    for kernel in ("act_f16", "act_f16_v4"):
        into = layer.room(f"hidden {kernel}", n_rows * ffn * 2)
        buffers = [*layer.keep("meta", "row_token"), *inputs, into, layer.saturated()]
        forms.append(Form(kernel, [layer.by_row(kernel, element_args(0, ffn), buffers)], into))
    return Step("act_f16", forms, (n_rows, ffn), np.float16)


def gemm_swiglu(layer: Layer) -> Step:
    """The shared expert's gate, up and activation: three kernels, or one."""
    n_tokens, dim, ffn = layer.n_tokens, layer.sizes["dim"], layer.sizes["expert_ffn"]
    size = dense_tile(n_tokens)
    x = layer.values("mixed", n_tokens, dim, half=True)
    weights = [layer.weight(name, SHARED_TYPE, dim, ffn) for name in ("shared gate", "shared up")]
    row = quants.tensor_bytes(SHARED_TYPE, (dim,))
    suffix, grid = layer.suffix(SHARED_TYPE, size), (-(-ffn // size[1]), -(-n_tokens // size[0]), 1)
    products = [layer.room(f"shared product {i}", n_tokens * ffn * 4) for i in range(2)]
    args = struct.pack("<IIIfQ", n_tokens, ffn, dim, 1.0, row)
    apart: list[Call] = [
        (f"gemm_dense_{suffix}", args, [x, weight, into], grid) for weight, into in zip(weights, products, strict=True)
    ]
    into = [layer.room(f"shared hidden {i}", n_tokens * ffn * 2) for i in range(2)]
    buffers = [*products, into[0], layer.saturated()]
    apart.append(layer.by_token("swiglu_h", element_args(n_tokens, ffn), buffers, ffn))
    args = struct.pack("<IIIffIQ", n_tokens, ffn, dim, 1.0, 1.0, 0, row)
    fused: Call = (f"gemm_swiglu_f16_{suffix}", args, [x, *weights, into[1], layer.saturated()], grid)
    forms = [Form("two GEMMs, swiglu_h", apart, into[0]), Form("gemm_swiglu_f16", [fused], into[1])]
    return Step("gemm_swiglu_f16", forms, (n_tokens, ffn), np.float16, heavy=True)


def grouped_swiglu(layer: Layer) -> Step:
    """The experts' gate, up and activation on gathered rows: three kernels, or one."""
    n_rows, dim, ffn = layer.n_rows, layer.sizes["dim"], layer.sizes["expert_ffn"]
    rows = layer.values("gathered", n_rows, dim, half=True)
    products = {name: layer.room(f"product {name}", n_rows * ffn * 4) for name in ("gate", "up")}
    into = [layer.room(f"experts hidden {i}", n_rows * ffn * 2) for i in range(2)]
    apart = [layer.grouped(f"experts {name}", [rows], product) for name, product in products.items()]
    buffers = [*layer.keep("meta", "row_token"), *products.values(), into[0], layer.saturated()]
    apart.append(layer.by_row("act_f16", element_args(0, ffn), buffers))
    (gate_table, gate_scales), (up_table, up_scales) = (layer.experts(f"experts {name}") for name in products)
    tables = [gate_table, up_table, gate_scales, up_scales]
    _, args, _, grid = apart[0]
    name = f"gemm_grouped_swiglu_{layer.suffix(layer.gate_type, layer.tile)}"
    fused: Call = (name, args, [rows, *tables, *layer.keep("tiles", "meta"), into[1], layer.saturated()], grid)
    forms = [Form("gate, up, act_f16", apart, into[0]), Form("gemm_grouped_swiglu", [fused], into[1])]
    real = np.flatnonzero(layer.row_token >= 0)
    return Step("grouped swiglu", forms, (n_rows, ffn), np.float16, real, heavy=True)


def combine(layer: Layer) -> Step:
    """The weighted sum and the write into the streams: two kernels, or one."""
    n_tokens, n_rows, dim, top_k = layer.n_tokens, layer.n_rows, layer.sizes["dim"], layer.sizes["top_k"]
    summed = [*layer.keep("position", "row_weight"), layer.values("expert out", n_rows, dim)]
    routed = layer.room("routed", n_tokens * dim * 4)
    side = [layer.values("shared out", n_tokens, dim), layer.values("scalar", n_tokens)]
    side.append(layer.values("inject", n_tokens, N_STREAMS))
    forms = []
    for ending in ("", "_v4"):
        streams = np.random.default_rng(SEED).standard_normal((n_tokens, N_STREAMS, dim), np.float32)
        into = [layer.device.upload(streams) for _ in range(2)]
        args = struct.pack("<III", n_tokens, top_k, dim)
        apart = [layer.by_token(f"mm_combine{ending}", args, [*summed, routed], dim)]
        args = struct.pack("<III", n_tokens, N_STREAMS, dim)
        apart.append(layer.by_token(f"moe_out{ending}", args, [routed, *side, into[0]], dim))
        args = struct.pack("<IIII", n_tokens, top_k, N_STREAMS, dim)
        fused = layer.by_token(f"moe_out_combine{ending}", args, [*summed, *side, into[1]], dim)
        forms += [
            Form(f"mm_combine{ending}, moe_out{ending}", apart, into[0]),
            Form(f"moe_out_combine{ending}", [fused], into[1]),
        ]
    return Step("combine and write", forms, (n_tokens, N_STREAMS, dim), np.float32)


def gatherless(layer: Layer) -> Step:
    """gate and up: on gathered rows, or through row_token."""
    n_rows, ffn = layer.n_rows, layer.sizes["expert_ffn"]
    gather = layer.gather()
    mixed, rows = gather[2][2], gather[2][3]
    into = [layer.room(f"gate and up {i}", n_rows * ffn * 4) for i in range(4)]
    names = ("experts gate", "experts up")
    apart = [gather, *(layer.grouped(name, [rows], into[i]) for i, name in enumerate(names))]
    direct = [mixed, *layer.keep("row_token")]
    fused = [layer.grouped(name, direct, into[2 + i], "_gatherless") for i, name in enumerate(names)]
    forms = [Form("mm_gather_h, gate, up", apart, into[1]), Form("gatherless gate, up", fused, into[3])]
    real = np.flatnonzero(layer.row_token >= 0)
    return Step("gather", forms, (n_rows, ffn), np.float32, real, heavy=True)


MAKERS: dict[str, Callable[[Layer], Step]] = {
    "swiglu_h": swiglu,
    "act_f16": act,
    "gemm_swiglu_f16": gemm_swiglu,
    "grouped_swiglu": grouped_swiglu,
    "combine": combine,
    "gather": gatherless,
}


# --- the measurement --------------------------------------------------------------------------------------------


def present(step: Step) -> Iterator[Form]:
    """The forms whose kernels exist: the fused GEMMs are not compiled for every type."""
    known = _core.kernels()
    for form in step.forms:
        if all(call[0] in known for call in form.calls):
            yield form


def step_rows(layer: Layer, step: Step) -> list[dict[str, Any]]:
    """Checks that all forms agree, then lets them take turns."""
    device, arguments = layer.device, layer.arguments
    forms = list(present(step))
    results = []
    seconds = 0.0
    for form in forms:
        seconds += time_calls(device, form.calls, 1)
        result = np.empty(step.shape, step.dtype)
        device.read(form.output, result)
        results.append(result if step.rows is None else result[step.rows])
        off = measure.rel_l2(results[-1], results[0])
        if not off <= ELEMENT_BOUND:
            raise CheckFailed(
                f"[bench epilogue T={layer.n_tokens}] expected {form.name} within {ELEMENT_BOUND:g} of "
                f"{forms[0].name}, got {off:.2e}: not timed"
            )
    layers = arguments.layers or (1 if step.heavy and on_host(device) else LAYERS)
    runs = {form.name: lambda form=form: time_calls(device, form.calls, layers) for form in forms}
    rounds = rounds_for(arguments, seconds * layers)
    times = take_turns(runs, rounds)
    rows = []
    for form, result in zip(forms, results, strict=True):
        row = {"tokens": layer.n_tokens, "device": device.kind, "step": step.name, "variant": form.name}
        row |= {"kernels": len(form.calls), "layers": layers, "rounds": rounds}
        row["differing_bytes"] = byte_difference(result, results[0])
        rows.append({**row, **spread(times[form.name], "us", 1e6)})
    fastest = min(rows, key=lambda row: row["us"])
    for row in rows:
        row["speedup"] = rows[0]["us"] / row["us"]
        row["fastest"] = row is fastest
        # A lead within the spread of the measurement is none.
        row["clear"] = all(other is fastest or fastest["us_p90"] < other["us_p10"] for other in rows)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    show_table(
        ["T", "step", "form", "us a layer (p10-p90)", "speedup", "bits", ""],
        [
            [
                row["tokens"],
                row["step"],
                row["variant"],
                f"{row['us']:.1f} ({row['us_p10']:.1f}-{row['us_p90']:.1f})",
                f"{row['speedup']:.2f}x",
                "differ" if row["differing_bytes"] else "same",
                ("fastest" if row["clear"] else "fastest, within the spread") if row["fastest"] else "",
            ]
            for row in rows
        ],
        "speedup over the first form of a step",
    )
