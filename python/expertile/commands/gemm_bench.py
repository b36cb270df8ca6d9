"""One GEMM by itself, type by type: `expertile bench dense`, and `bench moe --formats` for the grouped one."""

from __future__ import annotations

import argparse
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expertile import _core, quants, reference
from expertile.commands.bench_common import (
    SEED,
    Work,
    accuracy,
    add_options,
    add_peer,
    bench_routing,
    measured_peak,
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
    time_calls,
    time_fields,
    write_csv,
)
from expertile.commands.common import (
    add_command,
    add_precision,
    finish,
    open_device,
    positive,
    say,
    tile,
    word_list,
)
from expertile.commands.plan_parity import plan_reference
from expertile.peer.client import Peer
from expertile.synth import SynthTensor, random_tensor

DEFAULT_TOKENS = [1, 32, 512]
DEFAULT_TILE = (16, 64, 32, 2)
Tile = tuple[int, int, int, int]
Array = NDArray[Any]


@dataclass
class Product:
    """A GEMM that is ready to run: its launch, what it gave, and what it should have given on some of its rows."""

    format: str
    precision: str
    n_tokens: int
    launch: tuple[Any, ...]  # as _core.time_kernels takes it
    output: Any
    shape: tuple[int, int]
    rows: Array  # the rows of `output` that are results, in the order of the peer's
    checked: Array  # of those, the ones that the references are of
    fp16: Array
    exact: Array
    work: Work
    buffers: list[Any]  # what must live as long as the launch

    def time(self, device: Any) -> float:
        return time_calls(device, [self.launch], 1, self.precision)

    def result(self, device: Any) -> Array:
        y = np.empty(self.shape, np.float32)
        device.read(self.output, y)
        return y[self.rows]


def add(stages: Any) -> None:
    parser = add_command(stages, "dense", run_dense, "a dense GEMM of each type")
    parser.add_argument("--formats", type=word_list, default=["all"], metavar="LIST", help="types (default all)")
    parser.add_argument("--inner", type=positive, default=2560, metavar="N", help="inner size (default 2560)")
    parser.add_argument("--cols", type=positive, default=2560, metavar="N", help="outputs (default 2560)")
    parser.add_argument("--tile", type=tile, metavar="M,N,K,S", help="tile (default: by T, as a layer does)")
    add_options(parser, DEFAULT_TOKENS, routing=False)
    add_precision(parser)
    add_peer(parser)


def run_dense(arguments: argparse.Namespace) -> int:
    device = open_device(arguments.device, arguments.threads)
    size = arguments.tile or DEFAULT_TILE
    chosen = known_formats(arguments.formats, "gemm_dense", size, arguments.inner)

    def products(name: str, peer: Peer | None) -> Iterator[Product]:
        weight = random_tensor(f"dense {name}", name, (arguments.inner, arguments.cols), SEED)
        if peer is not None:
            peer.add_weight("weight", weight)
        buffer = device.upload(weight.data)
        for n_tokens in arguments.tokens:
            x = np.random.default_rng([SEED, n_tokens]).standard_normal((n_tokens, arguments.inner), np.float32)
            if peer is not None:
                peer.request("dense", [x], name="weight")
            yield dense_product(device, weight, buffer, x, arguments)

    top = {"inner": arguments.inner, "cols": arguments.cols}
    return run_products(arguments, "bench dense", device, chosen, products, top)


def run_formats(arguments: argparse.Namespace, sizes: dict[str, int]) -> int:
    """The gate GEMM of a layer, for each type."""
    device = open_device(arguments.device, arguments.threads)
    size = arguments.tile or DEFAULT_TILE
    chosen = known_formats(arguments.formats, "gemm_grouped", size, sizes["dim"])

    def products(name: str, peer: Peer | None) -> Iterator[Product]:
        shape = (sizes["dim"], sizes["expert_ffn"], sizes["n_experts"])
        weight = random_tensor(f"grouped {name}", name, shape, SEED)
        if peer is not None:
            peer.add_weight("weight", weight)
        buffer = device.upload(weight.data)
        for n_tokens in arguments.tokens:
            ids, weights = bench_routing(arguments.routing, n_tokens, sizes["n_experts"], sizes["top_k"])
            x = np.random.default_rng([SEED, n_tokens]).standard_normal((n_tokens, sizes["dim"]), np.float32)
            if peer is not None:
                peer.request("grouped", [x, ids], name="weight")
            yield grouped_product(device, weight, buffer, x, (ids, weights), size, arguments)

    return run_products(arguments, "bench moe", device, chosen, products, {**sizes, "routing": arguments.routing})


def known_formats(asked: list[str], base: str, size: Tile, n_inner: int) -> dict[str, str]:
    """Type -> kernel, of the types asked for; "all" leaves out those whose quant block does not divide a row."""
    kernels = _core.kernels()
    every = {name: f"{base}_{row[0]}_" + "_".join(map(str, size)) for name, row in _core.types().items()}
    known = {name: kernel for name, kernel in every.items() if kernel in kernels}
    if asked == ["all"]:
        return {name: kernel for name, kernel in known.items() if n_inner % quants.type_info(name).elements == 0}
    for name in asked:
        if name.upper() not in known:
            text = ",".join(map(str, size))
            raise ValueError(f"[--formats] expected some of {', '.join(known)} for tile {text}, got {name}")
    return {name.upper(): known[name.upper()] for name in asked}


def dense_tile(n_tokens: int) -> Tile:
    """The tile that a layer takes for a dense GEMM of so many rows."""
    if n_tokens <= 16:
        return DEFAULT_TILE
    return (32, 64, 32, 4) if n_tokens <= 64 else (64, 64, 32, 4)


def dense_product(device: Any, weight: SynthTensor, buffer: Any, x: Array, arguments: argparse.Namespace) -> Product:
    n_tokens, n_inner, n_cols = len(x), weight.shape[0], weight.shape[1]
    size = arguments.tile or dense_tile(n_tokens)
    kernel = f"gemm_dense_{_core.types()[weight.type][0]}_" + "_".join(map(str, size))
    packed = struct.pack("<IIIfQ", n_tokens, n_cols, n_inner, 1.0, quants.tensor_bytes(weight.type, (n_inner,)))
    half = device.upload(reference.to_half(x)[0])
    output = device.alloc(n_tokens * n_cols * 4)
    grid = (-(-n_cols // size[1]), -(-n_tokens // size[0]), 1)
    at = sample(n_tokens, arguments.check_tokens)
    matrix = quants.dequantize(weight.data, weight.type, weight.shape).astype(np.float64)
    fp16, exact = (reference.product(x[at], matrix, operands) for operands in ("fp16", "exact"))
    padded = -(-n_tokens // size[0]) * size[0]
    return Product(
        format=weight.type,
        precision=arguments.precision,
        n_tokens=n_tokens,
        launch=(kernel, packed, [half, buffer, output], grid),
        output=output,
        shape=(n_tokens, n_cols),
        rows=np.arange(n_tokens),
        checked=at,
        fp16=fp16,
        exact=exact,
        work=product_work(n_tokens, padded, n_inner, n_cols, weight.data.nbytes),
        buffers=[half, buffer, output],
    )


def grouped_product(
    device: Any,
    weight: SynthTensor,
    buffer: Any,
    x: Array,
    routing: tuple[Array, Array],
    size: Tile,
    arguments: argparse.Namespace,
) -> Product:
    """The rows of a plan through every expert's matrix, as a layer's gate."""
    ids, _ = routing
    n_inner, n_cols, n_experts = weight.shape
    plan = plan_reference(*routing, n_experts, size[0])
    rows = len(plan["row_token"])
    one = quants.tensor_bytes(weight.type, (n_inner, n_cols))
    table = buffer.address + np.arange(n_experts, dtype=np.uint64) * np.uint64(one)
    inputs = [
        reference.gather(reference.to_half(x)[0], plan["row_token"]),
        table,
        np.ones(n_experts, np.float32),
        plan["tiles"],
        plan["meta"],
    ]
    output = device.alloc(rows * n_cols * 4)
    buffers = [*(device.upload(array) for array in inputs), output]
    kernel = f"gemm_grouped_{_core.types()[weight.type][0]}_" + "_".join(map(str, size))
    packed = struct.pack("<IIIfQ", 0, n_cols, n_inner, 1.0, quants.tensor_bytes(weight.type, (n_inner,)))
    at = sample(len(ids), arguments.check_tokens)
    entries = (at[:, None] * ids.shape[1] + np.arange(ids.shape[1])).reshape(-1)
    fp16, exact = entry_references(x[at], ids[at], weight)
    used = int(np.count_nonzero(np.bincount(ids.reshape(-1), minlength=n_experts)))
    return Product(
        format=weight.type,
        precision=arguments.precision,
        n_tokens=len(ids),
        launch=(kernel, packed, buffers, (-(-n_cols // size[1]), len(plan["tiles"]), 1)),
        output=output,
        shape=(rows, n_cols),
        rows=plan["position"],
        checked=entries,
        fp16=fp16,
        exact=exact,
        work=product_work(ids.size, rows, n_inner, n_cols, used * one),
        buffers=[*buffers, buffer],
    )


def entry_references(x: Array, ids: Array, weight: SynthTensor) -> tuple[Array, Array]:
    """Each entry's product with its expert's matrix, with fp16 operands and exact."""
    n_inner, n_cols, _ = weight.shape
    one = quants.tensor_bytes(weight.type, (n_inner, n_cols))
    fp16, exact = (np.zeros((*ids.shape, n_cols)) for _ in range(2))
    for expert in np.unique(ids).tolist():
        raw = weight.data[expert * one : (expert + 1) * one]
        matrix = quants.dequantize(raw, weight.type, (n_inner, n_cols)).astype(np.float64)
        at = np.nonzero(ids == expert)
        fp16[at] = reference.product(x[at[0]], matrix, "fp16")
        exact[at] = reference.product(x[at[0]], matrix, "exact")
    return fp16.reshape(-1, n_cols), exact.reshape(-1, n_cols)


def run_products(
    arguments: argparse.Namespace, command: str, device: Any, chosen: dict[str, str], products: Any, top: dict[str, Any]
) -> int:
    """Type by type: makes the weights, checks, takes turns with the peer."""
    peer = open_peer(arguments)
    rows: list[dict[str, Any]] = []
    try:
        peak = measured_peak(device, arguments)
        for name in chosen:
            for product in products(name, peer):
                rows.append(product_row(arguments, command, device, product, peer, peak))
                del product  # its weights make room for the next type's
        top = {**top, "threads": thread_count(arguments), "peak_flops": peak}
        if peer is not None:
            top |= {"peer_version": peer.version, "peer_features": peer.info["features"]}
    finally:
        if peer is not None:
            peer.close()
    say(f"{device.name}, {top['threads']} threads" + (f"; fp32 peak {peak / 1e9:.0f} GFLOP/s" if peak else ""))
    if peer is not None:
        say(f"peer: {top['peer_version']} ({' '.join(top['peer_features'])}); ratio = its time over ours")
    title = f"one GEMM, {rows[0]['precision']}; errors: relative L2 to the exact reference"
    show_products(rows, {"format": "type", "tokens": "T"}, title)
    write_csv(arguments.csv, rows)
    return finish(arguments, command, True, rows, device, top)


def product_row(
    arguments: argparse.Namespace, command: str, device: Any, product: Product, peer: Peer | None, peak: float | None
) -> dict[str, Any]:
    """Nothing is timed before its result is known to be right."""
    precision = product.precision
    where = f"{command} {product.format} T={product.n_tokens}"
    seconds = product.time(device)
    y = product.result(device)
    found: dict[str, Any] = accuracy(y[product.checked], product.fp16, product.exact)
    require(where, found, y, precision)
    runs: dict[str, Any] = {"ours": lambda: product.time(device)}
    if peer is not None:
        seconds += peer.run()
        theirs = peer.result().reshape(len(product.rows), -1)
        found |= require_peer(where, theirs, product.checked, product.exact, y)
        runs["peer"] = peer.run
    rounds = rounds_for(arguments, seconds)
    times = take_turns(runs, rounds)
    row: dict[str, Any] = {
        "tokens": product.n_tokens,
        "device": device.kind,
        "format": product.format,
        "kernel": product.launch[0],
        "precision": precision,
        "rounds": rounds,
        "check_tokens": min(product.n_tokens, arguments.check_tokens),
        **time_fields(times["ours"], product.work, peak),
        **found,
    }
    if peer is not None:
        row |= peer_fields(row, f"ggml {peer.info['version']}", times["peer"])
    return row
