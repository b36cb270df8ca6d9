"""A launch of every kernel, on small and odd sizes, for the comparison of devices and for the sanitizer."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from cases import random_weight

from expertile.plan import Plan, make_plan
from expertile.quants import TYPES

Array = npt.NDArray[Any]

# Odd sizes: tokens, width, streams, experts, slots, hidden; no expert is chosen by all, the last one by none.
T, D, C, E, K, F = 37, 328, 4, 9, 3, 72
TILES = ((16, 32, 32, 4), (16, 64, 32, 2), (32, 64, 32, 4), (64, 64, 32, 4))


@dataclass
class Run:
    """One launch. `experts` stands for a table of pointers to these arrays in the device's memory."""

    kernel: str
    args: bytes
    buffers: list[Any]
    grid: tuple[int, int]
    outputs: dict[int, str] = field(default_factory=dict)  # buffer -> "exact", "half", "float", "gemm"


def run(device: Any, launch: Run) -> dict[int, Array]:
    """Runs it on copies; the outputs by their buffers' indices."""
    from expertile import _core

    keep, buffers = [], []
    for buffer in launch.buffers:
        if isinstance(buffer, list):  # experts' weights -> table of addresses
            keep += [device.upload(weights) for weights in buffer]
            buffers.append(np.array([one.address for one in keep[-len(buffer) :]], np.uint64))
        else:
            buffers.append(buffer.copy())
    _core.run_kernel(device, launch.kernel, launch.args, buffers, [*launch.grid, 1])
    return {index: buffers[index] for index in launch.outputs}


def chunks(kernel: str, columns: int) -> int:
    """Threadgroups over the columns; a _v4 kernel takes 4 columns for each of 160 threads."""
    return -(-columns // (640 if kernel.endswith("_v4") else 256))


def plan_of(rng: np.random.Generator, tile_rows: int) -> tuple[Plan, Array, Array]:
    ids = np.argsort(rng.random((T, E - 1)), axis=1)[:, :K].astype(np.int32)
    ids[5, 1] = -1
    weights = rng.random((T, K), np.float32)
    return make_plan(ids, weights, E, tile_rows, 3, 5), ids, weights


def unset(shape: tuple[int, ...], dtype: type) -> Array:
    """What no kernel writes by chance."""
    if np.issubdtype(dtype, np.floating):
        return np.full(shape, np.nan, dtype)
    return np.full(shape, np.iinfo(dtype).max // 3, dtype)


def counter() -> Array:
    return np.zeros(1, np.uint64)


def normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape, np.float32)


def spread(rng: np.random.Generator, *shape: int) -> Array:
    """Normal, with values beyond half's range and a NaN."""
    values = normal(rng, *shape)
    values.reshape(-1)[:: max(1, values.size // 7)] *= np.float32(3e4)
    values.reshape(-1)[values.size // 2] = np.nan
    return values


def gathers(rng: np.random.Generator) -> Iterator[Run]:
    plan, _, _ = plan_of(rng, 16)
    for kernel, dtype in (("mm_gather", np.float32), ("mm_gather_h", np.float16)):
        for width in (D, 2560, 7, 20):
            x = normal(rng, T, width).astype(dtype)
            rows = unset((plan.n_rows, width), dtype)
            args = struct.pack("<I", width)
            yield Run(kernel, args, [plan.meta, plan.row_token, x, rows], (plan.n_rows + 3, 1), {3: "exact"})


def elementwise(rng: np.random.Generator) -> Iterator[Run]:
    plan, _, _ = plan_of(rng, 16)
    rows = plan.n_rows
    args = struct.pack("<IIfI", 0, F, 1.0, 0)
    buffers = [plan.meta, plan.row_token, spread(rng, rows, F), normal(rng, rows, F), unset((rows, F), np.float16)]
    for kernel in ("act_f16", "act_f16_v4"):
        yield Run(kernel, args, [*buffers, counter()], (rows + 2, 1), {4: "half", 5: "exact"})
    args = struct.pack("<IIfI", T, F, 1.0, 0)
    buffers = [spread(rng, T, F), normal(rng, T, F), unset((T, F), np.float16), counter()]
    for kernel in ("swiglu_h", "swiglu_h_v4"):
        grid = (-(-T * F // 2048), 1) if kernel.endswith("_v4") else (chunks(kernel, F), T)
        yield Run(kernel, args, buffers, grid, {2: "half", 3: "exact"})
    args = struct.pack("<IIfI", T, D, float(C), 0)
    buffers = [spread(rng, T, D), unset((T, D), np.float16), counter()]
    yield Run("gr_epi_down", args, buffers, (chunks("", D), T), {1: "half", 2: "exact"})
    yield Run("gr_epi_down_v4", args, buffers, (-(-T * D // 2048), 1), {1: "half", 2: "exact"})
    for suffix, width in itertools.product(("", "_v4"), (D, D + 1, 2560)):
        yield from writes(rng, plan, suffix, width)


def writes(rng: np.random.Generator, plan: Plan, suffix: str, width: int) -> Iterator[Run]:
    """mm_combine, moe_out and both in one, on `width` columns."""
    y, x = normal(rng, plan.n_rows, width), normal(rng, T, C, width)
    gates = [normal(rng, T), normal(rng, T, C)]
    grid = (chunks(suffix, width), T)
    buffers = [plan.position, plan.row_weight, y, unset((T, width), np.float32)]
    yield Run(f"mm_combine{suffix}", struct.pack("<3I", T, K, width), buffers, grid, {3: "exact"})
    buffers = [normal(rng, T, width), normal(rng, T, width), *gates, x]
    yield Run(f"moe_out{suffix}", struct.pack("<3I", T, C, width), buffers, grid, {4: "float"})
    buffers = [plan.position, plan.row_weight, y, normal(rng, T, width), *gates, x]
    yield Run(f"moe_out_combine{suffix}", struct.pack("<4I", T, K, C, width), buffers, grid, {6: "float"})


def streams(rng: np.random.Generator) -> Iterator[Run]:
    x, gamma, inverse = normal(rng, T, C, D), normal(rng, C * D), rng.random((T, C), np.float32) + 0.5
    args = struct.pack("<IIIf", T, C, D, 1e-6)
    buffers = [x, gamma, unset((T, C * D), np.float16), unset((T, C), np.float32), counter()]
    yield Run("gr_norm_h", args, buffers, (C, T), {2: "half", 3: "float", 4: "exact"})
    buffers = [x, inverse, gamma, normal(rng, C, C * D), unset((T, C), np.float32)]
    yield Run("gr_inject", args, buffers, (T, 1), {4: "gemm"})
    logits = normal(rng, T, E)
    logits[3] = np.inf
    logits[4, : E - 1] = np.nan
    args = struct.pack("<4I", T, E, K, 6)
    buffers = [logits, unset((T, K), np.int32), unset((T, K), np.float32), np.zeros(T, np.uint32)]
    yield Run("route_topk", args, buffers, (T, 1), {1: "exact", 2: "float", 3: "exact"})


def matrix(rng: np.random.Generator, name: str, columns: int, inner: int) -> tuple[Array, int]:
    weight = random_weight(name, (inner, columns), rng)
    data = np.asarray(weight.data).view(np.uint8).reshape(-1)
    return data, data.nbytes // columns


def decoders(rng: np.random.Generator) -> Iterator[Run]:
    for name, info in TYPES.items():
        columns, inner = 5, 2 * max(info.elements, 32)
        data, _ = matrix(rng, name, columns, inner)
        values = unset((columns * inner,), np.float32)
        args = struct.pack("<Q", columns * inner)
        grid = (-(-columns * inner // 8 // 256), 1)
        yield Run(f"dequantize_{name.lower()}", args, [data, values], grid, {1: "exact"})


Tile = tuple[int, int, int, int]


def products(rng: np.random.Generator, formats: list[str], one_tile: bool) -> Iterator[Run]:
    for number, name in enumerate(formats):
        inner = 2 * max(TYPES[name].elements, 48)
        data, row_bytes = matrix(rng, name, F + 1, inner)
        x = normal(rng, T, inner).astype(np.float16)
        for m, n, k, s in [TILES[number % len(TILES)]] if one_tile else TILES:
            args = struct.pack("<IIIfQ", T, F + 1, inner, 0.5, row_bytes)
            kernel = f"gemm_dense_{name.lower()}_{m}_{n}_{k}_{s}"
            grid = (-(-(F + 1) // n), -(-T // m))
            yield Run(kernel, args, [x, data, unset((T, F + 1), np.float32)], grid, {2: "gemm"})
            yield grouped(rng, name, (m, n, k, s), inner)
            yield up_product(rng, name, (m, n, k, s), inner)
            yield from fused(rng, name, (m, n, k, s), inner)
    for m, n, k, s in TILES:
        w, x = normal(rng, E, D), normal(rng, T, D)
        args = struct.pack("<IIIfQ", T, E, D, 2.0, D * 4)
        grid = (-(-E // n), -(-T // m))
        yield Run(f"gemm_dense_fp32_{m}_{n}_{k}_{s}", args, [x, w, unset((T, E), np.float32)], grid, {2: "gemm"})


def grouped(rng: np.random.Generator, name: str, tile: tuple[int, int, int, int], inner: int) -> Run:
    m, n, k, s = tile
    plan, _, _ = plan_of(rng, m)
    experts = [matrix(rng, name, F, inner) for _ in range(E)]
    x = normal(rng, plan.n_rows, inner).astype(np.float16)
    y = np.full((plan.n_rows, F), -7.0, np.float32)  # padding rows are not written
    args = struct.pack("<IIIfQ", 0, F, inner, 1.0, experts[0][1])
    scales = rng.random(E, np.float32) + 0.5
    buffers = [x, [data for data, _ in experts], scales, plan.tiles, plan.meta, y]
    kernel = f"gemm_grouped_{name.lower()}_{m}_{n}_{k}_{s}"
    return Run(kernel, args, buffers, (-(-F // n), plan.n_tiles + 2), {5: "gemm"})


def fused(rng: np.random.Generator, name: str, tile: Tile, inner: int) -> Iterator[Run]:
    """The kernels that are several in one: SwiGLU behind both products, tokens and experts, and no gather."""
    m, n, k, s = tile
    suffix, (plan, _, _) = f"{name.lower()}_{m}_{n}_{k}_{s}", plan_of(rng, m)
    gate, up = ([matrix(rng, name, F, inner) for _ in range(E)] for _ in range(2))
    tables = [[data for data, _ in side] for side in (gate, up)]
    scales = [rng.random(E, np.float32) + 0.5 for _ in range(2)]
    row_bytes, grid = gate[0][1], (-(-F // n), plan.n_tiles + 2)
    args = struct.pack("<IIIfQ", 0, F, inner, 1.0, row_bytes)
    x = normal(rng, T, inner).astype(np.float16)
    rows = normal(rng, plan.n_rows, inner).astype(np.float16)
    y = np.full((plan.n_rows, F), -7.0, np.float32)
    buffers = [x, plan.row_token, tables[0], scales[0], plan.tiles, plan.meta, y]
    yield Run(f"gemm_grouped_{suffix}_gatherless", args, buffers, grid, {6: "gemm"})
    h = np.full((plan.n_rows, F), -7.0, np.float16)
    buffers = [rows, *tables, *scales, plan.tiles, plan.meta, h, counter()]
    yield Run(f"gemm_grouped_swiglu_{suffix}", args, buffers, grid, {7: "gemm", 8: "exact"})
    args = struct.pack("<IIIffIQ", T, F, inner, 0.5, 0.25, 0, row_bytes)
    buffers = [x, tables[0][0], tables[1][0], np.full((T, F), -7.0, np.float16), counter()]
    yield Run(f"gemm_swiglu_f16_{suffix}", args, buffers, (-(-F // n), -(-T // m)), {3: "gemm", 4: "exact"})


def up_product(rng: np.random.Generator, name: str, tile: tuple[int, int, int, int], inner: int) -> Run:
    m, n, k, s = tile
    data, row_bytes = matrix(rng, name, C * F, inner)
    lo, x = normal(rng, T, inner).astype(np.float16), normal(rng, T, C, F)
    inverse, gamma = rng.random((T, C), np.float32) + 0.5, normal(rng, C * F)
    outputs = [unset((T, F), np.float32), unset((T, F), np.float16), counter()]
    args = struct.pack("<IIIIQ", T, C, F, inner, row_bytes)
    kernel = f"gemm_hc_up_{name.lower()}_{m}_{n}_{k}_{s}"
    grid = (-(-F // n), -(-T // m))
    return Run(kernel, args, [lo, data, x, inverse, gamma, *outputs], grid, {5: "gemm", 6: "gemm", 7: "exact"})


def all_runs(formats: list[str], one_tile: bool = False) -> list[Run]:
    """The launches whose kernels this build has; `one_tile`: of each format's GEMMs, the formats taking turns."""
    from expertile import _core

    rng = np.random.default_rng(20)
    known = set(_core.kernels())
    some = [*gathers(rng), *elementwise(rng), *streams(rng), *decoders(rng), *products(rng, formats, one_tile)]
    return [launch for launch in some if launch.kernel in known]
