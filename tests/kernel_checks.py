"""Kernels by themselves against numpy. A check takes `launch`, so that the same check judges any build of a kernel."""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from cases import integer_weight, random_weight

from expertile import quants, reference
from expertile.layer_weights import WeightArray
from expertile.measure import assert_bitwise_equal, half_ulp_distance, worst_token_rel_l2

Array = npt.NDArray[Any]
Tile = tuple[int, int, int, int]
# launch(kernel, args, buffers in the kernel's order, grid): buffers that the kernel writes are changed in place.
Launch = Callable[[str, bytes, list[Array], Sequence[int]], Any]

TILES: list[Tile] = [(16, 32, 32, 4), (16, 64, 32, 2), (32, 64, 32, 4), (64, 64, 32, 4)]
GEMM_BOUND = 5e-5
ELEMENT_BOUND = 2e-6


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def kernel_name(function: str, type_name: str, tile: Tile) -> str:
    return "_".join([function, type_name.lower(), *map(str, tile)])


def poisoned(*shape: int, dtype: Any = np.float32) -> Array:
    return np.full(shape, np.nan, dtype)


def count() -> Array:
    return np.zeros(1, np.uint64)


def with_poison_behind(array: Array) -> Array:
    """The array's bytes, then 4096 bytes of NaN: a read behind its end changes the result."""
    return np.concatenate([np.ascontiguousarray(array).view(np.uint8).reshape(-1), np.full(4096, 255, np.uint8)])


def at_page_end(raw: Array) -> Array:
    """A copy of uint8 bytes right before a page that cannot be read. Stays mapped until the process ends."""
    page = mmap.PAGESIZE
    size = ceil_div(raw.nbytes, page) * page
    memory = mmap.mmap(-1, size + page)
    view = np.frombuffer(memory, np.uint8)
    place = view[size - raw.nbytes : size]
    place[:] = raw.reshape(-1)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    assert protect(ctypes.c_void_p(view.ctypes.data + size), ctypes.c_size_t(page), 0) == 0
    return place


def matrix_of(weight: WeightArray) -> Array:
    """[rows, inner] float64, rounded once to half as the GEMMs do."""
    inner = weight.shape[0]
    values = quants.dequantize(weight.data, weight.type, weight.shape).reshape(-1, inner)
    return values.astype(np.float16).astype(np.float64)


def row_bytes(weight: WeightArray) -> int:
    return quants.tensor_bytes(weight.type, (weight.shape[0],))


def gemm_args(n_rows: int, weight: WeightArray, scale: float = 1.0) -> bytes:
    return struct.pack("<IIIfQ", n_rows, weight.shape[1], weight.shape[0], scale, row_bytes(weight))


def element_args(n_rows: int, n_cols: int, divisor: float = 0.0) -> bytes:
    return struct.pack("<IIfI", n_rows, n_cols, divisor, 0)


def assert_gemm(got: Array, want: Array, name: str) -> None:
    assert np.abs(want).max() > 0, f"{name}: a test on zeros"
    error, row = worst_token_rel_l2(got, want)
    assert error <= GEMM_BOUND, f"{name}: relative L2 {error:.2e} in row {row}"


def assert_near(got: Array, want: Array, name: str, size: Array | None = None, bound: float = ELEMENT_BOUND) -> None:
    """fp32 within `bound` of `size`: the values themselves, or the sizes of what was added up."""
    size = np.abs(want) if size is None else size
    excess = np.abs(got.astype(np.float64) - want) - bound * size - 1e-38
    worst = int(np.argmax(np.where(np.isnan(excess), np.inf, excess)))
    at = np.unravel_index(worst, excess.shape)
    assert np.all(excess <= 0), f"{name} at {at}: {got[at]!r}, not {want[at]!r}"


def assert_half(got: Array, exact: Array, name: str) -> int:
    """Half within one unit in the last place of the exact values; how many of those exceed the half limit."""
    with np.errstate(all="ignore"):
        want, exceeding = reference.to_half(exact)
    assert np.nanmax(np.abs(want.astype(np.float32))) > 0, f"{name}: a test on zeros"
    distance = half_ulp_distance(got, want)
    at = np.unravel_index(int(np.argmax(distance)), distance.shape)
    assert distance.max() <= 1, f"{name} at {at}: {got[at]!r}, not {want[at]!r}"
    return exceeding


# Dense products


def dense(launch: Launch, x: Array, weight: WeightArray, tile: Tile, scale: float = 1.0) -> Array:
    """y [n_rows, n_cols] of gemm_dense_<type>, everything around operands and result poisoned; a grid too large."""
    n_rows, n_cols = len(x), weight.shape[1]
    y = poisoned(n_rows + 3, n_cols)
    buffers = [with_poison_behind(x), with_poison_behind(weight.data), y]
    grid = (ceil_div(n_cols, tile[1]) + 1, ceil_div(n_rows, tile[0]) + 1, 1)
    launch(kernel_name("gemm_dense", weight.type, tile), gemm_args(n_rows, weight, scale), buffers, grid)
    assert np.isnan(y[n_rows:]).all(), "wrote behind the last row"
    return y[:n_rows]


def check_dense(
    launch: Launch, type_name: str, n_rows: int, n_cols: int, n_inner: int, tiles: Sequence[Tile] = tuple(TILES)
) -> None:
    """Within the bound; the same bits from every tile, and for a row alone."""
    rng = np.random.default_rng(n_cols + n_inner)
    x = rng.standard_normal((n_rows, n_inner)).astype(np.float16)
    weight = random_weight(type_name, (n_inner, n_cols), rng)
    want = 0.75 * (x.astype(np.float64) @ matrix_of(weight).T)
    first = dense(launch, x, weight, tiles[0], 0.75)
    assert_gemm(first, want, f"{type_name} {tiles[0]}")
    for tile in tiles[1:]:
        assert_bitwise_equal(dense(launch, x, weight, tile, 0.75), first, f"tile {tile}")
    row = n_rows // 2
    assert_bitwise_equal(dense(launch, x[row : row + 1], weight, tiles[-1], 0.75)[0], first[row], "a row alone")


def check_integers(launch: Launch, type_name: str, tile: Tile) -> None:
    """Products and partial sums that fp32 holds exactly: exact, whatever the order."""
    rng = np.random.default_rng(17)
    n_inner = 2 * max(quants.type_info(type_name).elements, 48)
    weight = integer_weight(type_name, (n_inner, 40), rng)
    x = rng.integers(-3, 4, (5, n_inner)).astype(np.float16)
    matrix, half = matrix_of(weight), x.astype(np.float64)
    unit = 2.0 ** np.floor(np.log2(np.min(np.abs(matrix[matrix != 0]))) - 12)
    while np.all(np.mod(matrix, 2 * unit) == 0):
        unit *= 2
    assert (np.abs(half) @ np.abs(matrix).T).max() / unit < 2**24, "partial sums that fp32 does not hold"
    assert_bitwise_equal(dense(launch, x, weight, tile), (half @ matrix.T).astype(np.float32) + np.float32(0), "y")


def check_fp32(launch: Launch, tile: Tile, n_rows: int, n_cols: int, n_inner: int) -> None:
    rng = np.random.default_rng(n_inner)
    x = rng.standard_normal((n_rows, n_inner)).astype(np.float32)
    w = rng.standard_normal((n_cols, n_inner)).astype(np.float32)
    y = poisoned(n_rows, n_cols)
    name = "_".join(["gemm_dense_fp32", *map(str, tile)])
    args = struct.pack("<IIIfQ", n_rows, n_cols, n_inner, 1.0, n_inner * 4)
    grid = (ceil_div(n_cols, tile[1]), ceil_div(n_rows, tile[0]), 1)
    launch(name, args, [with_poison_behind(x), with_poison_behind(w), y], grid)
    want = x.astype(np.float64) @ w.T.astype(np.float64)
    assert_near(y, want, name, np.abs(x).astype(np.float64) @ np.abs(w).T)


# The plan's rows


def rows_of_experts(counts: Sequence[int], tile_rows: int, n_tokens: int, rng: Any) -> tuple[Array, Array, Array]:
    """tiles (two bogus ones behind them), row_token, meta of a plan in which expert e has counts[e] rows."""
    tiles: list[tuple[int, int, int, int]] = []
    row_token: list[int] = []
    for expert, n in enumerate(counts):
        first = len(row_token)
        padded = ceil_div(n, tile_rows) * tile_rows
        tiles += [(expert, first + i, min(tile_rows, n - i), 0) for i in range(0, padded, tile_rows)]
        row_token += [*np.sort(rng.choice(n_tokens, n, replace=False)).tolist(), *[-1] * (padded - n)]
    meta = np.zeros(14, np.uint32)
    meta[:3] = len(row_token), len(tiles), sum(counts)
    bogus = (999, 10**8, tile_rows, 0)
    return np.array([*tiles, bogus, bogus], np.uint32), np.array(row_token, np.int32), meta


def check_gather(launch: Launch, kernel: str, dim: int) -> None:
    """Any bits, NaN payloads included; padding rows zero; nothing behind n_rows."""
    rng = np.random.default_rng(10)
    dtype, bits = (np.float16, np.uint16) if kernel.endswith("_h") else (np.float32, np.uint32)
    row_token = np.array([3, 3, -1, 8, 0, -1, 7], np.int32)
    n_rows = len(row_token)
    meta = np.zeros(14, np.uint32)
    meta[0] = n_rows
    x = rng.integers(0, np.iinfo(bits).max, (9, dim), dtype=bits, endpoint=True).view(dtype)
    rows = poisoned(n_rows + 2, dim, dtype=dtype)
    launch(kernel, struct.pack("<I", dim), [meta, row_token, x, rows], (n_rows + 2, 1, 1))
    assert np.isnan(rows[n_rows:]).all(), "wrote behind the last row"
    want = reference.gather(x.view(bits), row_token)
    np.testing.assert_array_equal(rows[:n_rows].view(bits), want)


def check_combine(launch: Launch, dim: int) -> Array:
    """Slot order, bit for bit; rows of no entry are NaN and stay out. Returns routed."""
    rng = np.random.default_rng(12)
    n_tokens, top_k, n_rows = 7, 5, 64
    position = rng.permutation(n_rows)[: n_tokens * top_k].astype(np.int32).reshape(n_tokens, top_k)
    position[1, 2] = -1
    position[2] = -1
    y = rng.standard_normal((n_rows, dim)).astype(np.float32)
    y[np.setdiff1d(np.arange(n_rows), position)] = np.nan
    weight = rng.random(n_rows).astype(np.float32)
    routed = poisoned(n_tokens, dim)
    args = struct.pack("<III", n_tokens, top_k, dim)
    launch("mm_combine", args, [position, weight, y, routed], (ceil_div(dim, 256) + 1, n_tokens + 1, 1))
    want = reference.combine_fp32(position, weight, y)
    assert np.count_nonzero(want) == (n_tokens - 1) * dim
    assert_bitwise_equal(routed, want, "routed")
    by_four = poisoned(n_tokens, dim)
    launch("mm_combine_v4", args, [position, weight, y, by_four], (ceil_div(dim, 640) + 1, n_tokens + 1, 1))
    assert_bitwise_equal(by_four, want, "mm_combine_v4")
    check_out(launch, position, weight, y, routed)
    return routed


def check_out(launch: Launch, position: Array, weight: Array, y: Array, routed: Array) -> None:
    """moe_out within its bound; its _v4 form, and moe_out_combine in both, with the same bits."""
    rng = np.random.default_rng(13)
    (n_tokens, top_k), (_, dim), n_streams = position.shape, y.shape, 3
    shared = rng.standard_normal((n_tokens, dim)).astype(np.float32)
    scalar = 4 * rng.standard_normal(n_tokens).astype(np.float32)
    inject = 9 * rng.standard_normal((n_tokens, n_streams)).astype(np.float32)
    x = rng.standard_normal((n_tokens, n_streams, dim)).astype(np.float32)
    results = {}
    for suffix, columns in (("", 256), ("_v4", 640)):
        grid = (ceil_div(dim, columns) + 1, n_tokens + 1, 1)
        results[f"moe_out{suffix}"] = written = x.copy()
        args = struct.pack("<III", n_tokens, n_streams, dim)
        launch(f"moe_out{suffix}", args, [routed, shared, scalar, inject, written], grid)
        results[f"moe_out_combine{suffix}"] = fused = x.copy()
        args = struct.pack("<IIII", n_tokens, top_k, n_streams, dim)
        launch(f"moe_out_combine{suffix}", args, [position, weight, y, shared, scalar, inject, fused], grid)
    apart = results["moe_out"]
    for kernel, other in results.items():
        assert_bitwise_equal(other, apart, kernel)
    opened = reference.sigmoid(scalar)[:, None] * shared
    out = routed.astype(np.float64) + opened
    strength = 2 * reference.sigmoid(inject.astype(np.float64) / n_streams)[:, :, None]
    size = np.abs(x) + strength * (np.abs(routed) + np.abs(opened))[:, None]
    assert_near(apart, reference.hc_write(x, inject, out), "moe_out", size)


def check_act(launch: Launch, ffn: int) -> None:
    """act_f16 and act_f16_v4: one result; garbage in padding rows neither counted nor seen."""
    rng = np.random.default_rng(11)
    row_token = np.array([0, 1, -1, 2, -1, 3], np.int32)
    n_rows, real = len(row_token), row_token >= 0
    meta = np.zeros(14, np.uint32)
    meta[0] = n_rows
    gate, up = (30 * rng.standard_normal((n_rows + 1, ffn)).astype(np.float32) for _ in range(2))
    gate[:n_rows][~real], up[:n_rows][~real] = np.nan, 1e30
    gate[4] = 1e30
    gate[1, :2] = 1e5, -200
    up[1, 0], up[1, 2] = -1e9, np.nan
    # silu(64) is 64 in fp32. The largest half; a little more, which is counted; ties among the smallest halves.
    edges = np.float32([65504, -65504, 65505, -65520, 1e30, 2.0**-25, 3 * 2.0**-25, -(2.0**-24)])[:ffn]
    gate[3, : len(edges)], up[3, : len(edges)] = 64, edges / 64
    results = []
    for kernel in ("act_f16", "act_f16_v4"):
        h, saturated = poisoned(n_rows + 1, ffn, dtype=np.float16), count()
        launch(kernel, element_args(0, ffn), [meta, row_token, gate, up, h, saturated], (n_rows + 1, 1, 1))
        assert np.isnan(h[n_rows:]).all(), f"{kernel}: wrote behind the last row"
        assert (h[:n_rows][~real] == 0).all(), f"{kernel}: padding rows are not zero"
        results.append((h[:n_rows], int(saturated[0])))
    with np.errstate(all="ignore"):
        exact = (reference.silu(gate) * up)[:n_rows][real]
    exceeding = assert_half(results[0][0][real], exact, "act_f16")
    assert_bitwise_equal(results[0][0][3, : len(edges)], reference.to_half(edges)[0], "edges of half")
    assert_bitwise_equal(results[1][0], results[0][0], "act_f16_v4")
    assert [n for _, n in results] == [exceeding] * 2 and exceeding >= 1, f"saturated: {results[0][1]}, not {exceeding}"


def check_route(launch: Launch, n_experts: int, top_k: int) -> None:
    """Ties, infinities, NaN and too few finite logits; every id exact, weights within 1e-6."""
    rng = np.random.default_rng(9)
    logits = rng.standard_normal((12, n_experts)).astype(np.float32)
    n_tokens, layer = len(logits), 3
    logits[1] = 0
    logits[2] = np.round(logits[2])  # ties
    logits[3], logits[3, :top_k] = -np.inf, 1
    logits[4], logits[4, n_experts - top_k :] = np.nan, -2
    logits[5, n_experts // 2] = np.inf
    logits[6], logits[6, : top_k - 1] = -np.inf, 3
    logits[7, ::2], logits[7, 1::2] = -0.0, 0.0  # equal
    logits[8] = -3.4e38
    logits[9] = np.nan
    logits[10] *= 50
    logits[11] = np.arange(n_experts)[::-1]
    ids = np.full((n_tokens, top_k), -77, np.int32)
    weights, status = poisoned(n_tokens, top_k), np.zeros(n_tokens, np.uint32)
    status[9] = 2  # a fault of an earlier layer stays
    args = struct.pack("<IIII", n_tokens, n_experts, top_k, layer)
    launch("route_topk", args, [logits, ids, weights, status], (n_tokens + 1, 1, 1))
    want_ids, want_weights, faults = reference.route_topk(logits, top_k)
    assert {5, 6, 9} <= set(faults)
    np.testing.assert_array_equal(ids, want_ids)
    assert np.abs(weights - want_weights).max() < 1e-6, "route weights"
    want_status = np.zeros(n_tokens, np.uint32)
    want_status[faults], want_status[9] = layer + 1, 2
    np.testing.assert_array_equal(status, want_status)
