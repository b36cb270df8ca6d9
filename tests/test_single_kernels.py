"""Every kernel by itself: against numpy, fused forms against unfused ones, on poisoned memory."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from cases import GEMM_CASES, GemmCase, random_weight
from kernel_checks import (
    TILES,
    Array,
    Launch,
    Tile,
    assert_gemm,
    assert_half,
    assert_near,
    at_page_end,
    ceil_div,
    check_act,
    check_combine,
    check_dense,
    check_fp32,
    check_gather,
    check_integers,
    check_route,
    count,
    dense,
    element_args,
    gemm_args,
    kernel_name,
    matrix_of,
    poisoned,
    row_bytes,
    rows_of_experts,
    with_poison_behind,
)

from expertile import _core, quants, reference
from expertile.layer_weights import WeightArray
from expertile.measure import assert_bitwise_equal

TYPES = list(quants.TYPES)


@pytest.fixture(scope="module")
def device(device_name: str) -> Any:
    """Guard words around every buffer; threads and threadgroups in a shuffled order where the device has one."""
    return _core.open_device(device_name, threads=1, order="shuffled", seed=3, guard=True)


@pytest.fixture(scope="module")
def launch(device: Any) -> Launch:
    return lambda kernel, args, buffers, grid: _core.run_kernel(device, kernel, args, buffers, list(grid))


def inner_size(type_name: str, n_blocks: int) -> int:
    """Some quant blocks; for types without, a size that is no multiple of the inner step."""
    elements = quants.type_info(type_name).elements
    return n_blocks * elements if elements > 1 else {1: 36, 2: 96, 3: 588}[n_blocks]


# Products


@pytest.mark.parametrize("type_name", TYPES)
def test_dense_gemm(launch: Launch, type_name: str) -> None:
    check_dense(launch, type_name, 37, 70, inner_size(type_name, 2))


@pytest.mark.parametrize("type_name", TYPES)
def test_gemm_on_integers_is_exact(launch: Launch, type_name: str) -> None:
    check_integers(launch, type_name, TILES[TYPES.index(type_name) % len(TILES)])


@pytest.mark.parametrize("case", GEMM_CASES, ids=lambda case: case.name)
def test_named_products(launch: Launch, case: GemmCase) -> None:
    weight, (x, saturated) = case.weight(), reference.to_half(case.x())
    assert saturated == (1 if case.special == "large_activation" else 0)
    want = x.astype(np.float64) @ matrix_of(weight).T
    y = dense(launch, x, weight, TILES[2])
    if case.special == "integers":
        assert_bitwise_equal(y, want.astype(np.float32) + np.float32(0), case.name)
    else:
        assert_gemm(y, want, case.name)


@pytest.mark.parametrize("n_cols", [40, 72, 1])
@pytest.mark.parametrize(
    ("type_name", "n_inner"),
    [
        ("Q8_0", 32),
        ("Q8_0", 96),
        ("IQ4_NL", 160),
        ("Q2_0", 64),
        ("IQ2_XS", 2560),
        ("IQ4_NL", 640),
        ("Q8_0", 10240),
        ("F16", 588),
        ("F16", 3),
        ("F32", 20),
        ("BF16", 37),
    ],
)
def test_inner_and_output_sizes(launch: Launch, type_name: str, n_inner: int, n_cols: int) -> None:
    check_dense(launch, type_name, 3, n_cols, n_inner, (TILES[0], TILES[3]))


@pytest.mark.parametrize(("n_rows", "n_cols", "n_inner"), [(37, 70, 96), (5, 1, 588), (17, 33, 50), (1, 40, 3)])
@pytest.mark.parametrize("tile", TILES)
def test_fp32_gemm(launch: Launch, tile: Tile, n_rows: int, n_cols: int, n_inner: int) -> None:
    check_fp32(launch, tile, n_rows, n_cols, n_inner)


class Grouped:
    """Experts' gate and up, each matrix right before a page that cannot be read, and rows that a plan sorted."""

    def __init__(self, device: Any, type_name: str, tile: Tile) -> None:
        rng = np.random.default_rng(4)
        self.tile, self.type_name, n_tokens = tile, type_name, 80
        self.ffn = 40 if tile[1] == 32 else 72  # two column tiles
        inner = inner_size(type_name, 1 if tile == TILES[3] else 3 if quants.type_info(type_name).elements < 256 else 2)
        counts = (3, 0, tile[0], 1, tile[0] + 2)  # one expert without rows
        self.tiles, self.row_token, self.meta = rows_of_experts(counts, tile[0], n_tokens, rng)
        self.real = self.row_token >= 0
        self.tokens = rng.standard_normal((n_tokens, inner)).astype(np.float16)
        self.rows = np.where(self.real[:, None], self.tokens[self.row_token], np.float16(np.nan))
        self.weights = [[random_weight(type_name, (inner, self.ffn), rng) for _ in counts] for _ in range(2)]
        self.scales = [rng.uniform(0.5, 2.0, len(counts)).astype(np.float32) for _ in range(2)]
        self.keep = [[self.place(device, weight.data) for weight in matrices] for matrices in self.weights]
        self.tables = [np.array([address for _, address in placed], np.uint64) for placed in self.keep]
        self.args = gemm_args(0, self.weights[0][0], float("nan"))  # an expert's own scale is used
        self.grid = (ceil_div(self.ffn, tile[1]) + 1, len(self.tiles), 1)

    @staticmethod
    def place(device: Any, raw: Array) -> tuple[Any, int]:
        if device.kind in ("cpu", "emulator"):
            memory = at_page_end(raw)
            return memory, memory.ctypes.data
        buffer = device.upload(raw)
        return buffer, buffer.address

    def want(self, which: int) -> Array:
        y = np.zeros((len(self.rows), self.ffn))
        for expert, first, n, _ in self.tiles[: self.meta[1]].tolist():
            rows = self.rows[first : first + n].astype(np.float64)
            y[first : first + n] = rows @ matrix_of(self.weights[which][expert]).T * self.scales[which][expert]
        return y

    def product(self, launch: Launch, which: int, gatherless: bool = False) -> Array:
        n_rows = len(self.rows)
        y = poisoned(n_rows + 2, self.ffn)
        source = [with_poison_behind(self.tokens), self.row_token] if gatherless else [with_poison_behind(self.rows)]
        name = kernel_name("gemm_grouped", self.type_name, self.tile) + ("_gatherless" if gatherless else "")
        buffers = [*source, self.tables[which], self.scales[which], self.tiles, self.meta, y]
        launch(name, self.args, buffers, self.grid)
        assert np.isnan(y[n_rows:]).all() and np.isnan(y[:n_rows][~self.real]).all(), "wrote a row of padding"
        return y[:n_rows]


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("type_name", TYPES)
def test_grouped_gemm_gatherless_and_with_swiglu(device: Any, launch: Launch, type_name: str, tile: Tile) -> None:
    case = Grouped(device, type_name, tile)
    gate, up = (case.product(launch, which) for which in range(2))
    for which, y in enumerate((gate, up)):
        assert_gemm(y[case.real], case.want(which)[case.real], type_name)
    if quants.type_info(type_name).elements == 1:
        return  # the other forms are compiled for quantized types
    assert_bitwise_equal(case.product(launch, 0, gatherless=True), gate, "gatherless")
    n_rows = len(case.rows)
    apart, fused = (poisoned(n_rows, case.ffn, dtype=np.float16) for _ in range(2))
    counts = count(), count()
    buffers = [case.meta, case.row_token, gate, up, apart, counts[0]]
    launch("act_f16", element_args(n_rows, case.ffn), buffers, (n_rows + 1, 1, 1))
    name = kernel_name("gemm_grouped_swiglu", type_name, tile)
    buffers = [with_poison_behind(case.rows), *case.tables, *case.scales, case.tiles, case.meta, fused, counts[1]]
    launch(name, case.args, buffers, case.grid)
    assert np.isnan(fused[~case.real]).all() and (apart[~case.real] == 0).all()
    assert_bitwise_equal(fused[case.real], apart[case.real], "gate, up and SwiGLU in one")
    assert counts[0] == counts[1]


@pytest.mark.parametrize("type_name", TYPES)
def test_shared_swiglu_apart_by_vectors_and_fused(launch: Launch, type_name: str) -> None:
    rng = np.random.default_rng(5)
    n_rows, ffn, inner, scales = 37, 70, inner_size(type_name, 1), (300.0, 400.0)
    x = rng.standard_normal((n_rows, inner)).astype(np.float16)
    weights = [random_weight(type_name, (inner, ffn), rng) for _ in range(2)]
    gate, up = (dense(launch, x, w, TILES[0], scale) for w, scale in zip(weights, scales, strict=True))
    results = []
    for kernel, columns in (("swiglu_h", 256), ("swiglu_h_v4", 0)):
        h, saturated = poisoned(n_rows, ffn, dtype=np.float16), count()
        grid = (ceil_div(ffn, 256), n_rows, 1) if columns else (ceil_div(ffn * n_rows, 2048) + 1, 1, 1)
        launch(kernel, element_args(n_rows, ffn), [gate, up, h, saturated], grid)
        results.append((kernel, h, int(saturated[0])))
    args = struct.pack("<IIIffIQ", n_rows, ffn, inner, *scales, 0, row_bytes(weights[0]))
    for tile in TILES:
        h, saturated = poisoned(n_rows, ffn, dtype=np.float16), count()
        name = kernel_name("gemm_swiglu_f16", type_name, tile)
        operands = [with_poison_behind(array) for array in (x, weights[0].data, weights[1].data)]
        launch(name, args, [*operands, h, saturated], (ceil_div(ffn, tile[1]), ceil_div(n_rows, tile[0]), 1))
        results.append((name, h, int(saturated[0])))
    exceeding = assert_half(results[0][1], reference.silu(gate) * up, "swiglu_h")
    assert exceeding > 0
    for name, h, saturated in results:
        assert_bitwise_equal(h, results[0][1], name)
        assert saturated == exceeding, name


# The hyper-connection


@pytest.mark.parametrize(("n_streams", "dim"), [(4, 96), (1, 40), (3, 2560), (6, 33)])
def test_norm_and_inject(launch: Launch, n_streams: int, dim: int) -> None:
    rng = np.random.default_rng(6)
    n_tokens, eps, flat = 5, 1e-6, n_streams * dim
    x = 10 * rng.standard_normal((n_tokens, n_streams, dim)).astype(np.float32)
    x[1], x[2, 0] = 0, 1e16
    gamma = rng.uniform(0.5, 2.0, flat).astype(np.float32)
    gamma[0] = 1e6  # over the half limit
    w = rng.standard_normal((n_streams, flat)).astype(np.float32)
    args = struct.pack("<IIIf", n_tokens, n_streams, dim, eps)
    normed, inverse, saturated = poisoned(n_tokens, flat, dtype=np.float16), poisoned(n_tokens, n_streams), count()
    launch("gr_norm_h", args, [x, gamma, normed, inverse, saturated], (n_streams, n_tokens, 1))
    exact = x.astype(np.float64)
    want = 1 / np.sqrt((exact**2).mean(axis=2) + np.float64(np.float32(eps)))
    assert_near(inverse, want, "inverse_rms")
    xn = (exact * want[:, :, None]).reshape(n_tokens, flat) * gamma
    assert assert_half(normed, xn, "normed") == saturated[0] > 0
    inject = poisoned(n_tokens, n_streams)
    launch("gr_inject", args, [x, inverse, gamma, w, inject], (n_tokens, 1, 1))
    w64 = w.astype(np.float64)
    assert_near(inject, xn @ w64.T, "inject", np.abs(xn) @ np.abs(w64).T, 3e-6)


def test_low_rank_silu(launch: Launch) -> None:
    rng = np.random.default_rng(7)
    low = (20 * rng.standard_normal((5, 320))).astype(np.float32)
    low[0, :4] = 1e6, -1e6, np.nan, -0.0
    h, saturated = poisoned(5, 320, dtype=np.float16), count()
    launch("gr_epi_down", element_args(5, 320, 4.0), [low, h, saturated], (2, 6, 1))
    assert assert_half(h, reference.silu(low.astype(np.float64) / 4), "low_rank_half") == saturated[0] == 1
    for width in (320, 319, 318, 317):  # the end of the array lies in a vector
        some, by_four, counted = (
            np.ascontiguousarray(low[:, :width]),
            poisoned(5 * width + 8, dtype=np.float16),
            count(),
        )
        launch("gr_epi_down_v4", element_args(5, width, 4.0), [some, by_four, counted], (2, 1, 1))
        assert np.isnan(by_four[5 * width :]).all() and counted[0] == 1
        assert_bitwise_equal(by_four[: 5 * width].reshape(5, width), h[:, :width], "gr_epi_down_v4")


def hc_up(launch: Launch, lo: Array, weight: WeightArray, tile: Tile, x: Array, inverse: Array, gamma: Array) -> Any:
    n_tokens, n_streams, dim = x.shape
    mixed, half, saturated = poisoned(n_tokens, dim), poisoned(n_tokens, dim, dtype=np.float16), count()
    args = struct.pack("<IIIIQ", n_tokens, n_streams, dim, weight.shape[0], row_bytes(weight))
    operands = [with_poison_behind(array) for array in (lo, weight.data, x)]
    grid = (ceil_div(dim, tile[1]) + 1, ceil_div(n_tokens, tile[0]) + 1, 1)
    name = kernel_name("gemm_hc_up", weight.type, tile)
    launch(name, args, [*operands, inverse, gamma, mixed, half, saturated], grid)
    return mixed, half, int(saturated[0])


@pytest.mark.parametrize(
    ("type_name", "n_streams", "rank"), [*((name, 3, inner_size(name, 1)) for name in TYPES), ("Q8_0", 16, 672)]
)
def test_low_rank_up_gates_and_averages_the_streams(launch: Launch, type_name: str, n_streams: int, rank: int) -> None:
    rng = np.random.default_rng(8)
    n_tokens, dim = 19, 70
    x = rng.standard_normal((n_tokens, n_streams, dim)).astype(np.float32)
    inverse = rng.uniform(0.5, 2.0, (n_tokens, n_streams)).astype(np.float32)
    gamma = rng.uniform(0.5, 2.0, n_streams * dim).astype(np.float32)
    gamma[3] = 1e6
    lo = rng.standard_normal((n_tokens, rank)).astype(np.float16)
    weight = random_weight(type_name, (rank, n_streams * dim), rng)
    gate = (lo.astype(np.float64) @ matrix_of(weight).T).reshape(x.shape)
    terms = x.astype(np.float64) * inverse[:, :, None] * gamma.reshape(n_streams, dim) * reference.sigmoid(gate)
    first: Array | None = None
    for tile in TILES:
        mixed, half, saturated = hc_up(launch, lo, weight, tile, x, inverse, gamma)
        assert_near(mixed, terms.sum(axis=1) / n_streams, "mixed", np.abs(terms).sum(axis=1), 2e-5)
        want, exceeding = reference.to_half(mixed)
        assert_bitwise_equal(half, want, "mixed_half")
        assert saturated == exceeding > 0
        first = mixed if first is None else first
        assert_bitwise_equal(mixed, first, f"tile {tile}")


# Router, gather, epilogues


@pytest.mark.parametrize(
    ("n_experts", "top_k"), [(512, 10), (513, 11), (4096, 32), (33, 32), (7, 7), (1, 1), (100, 3), (256, 8)]
)
def test_route_topk(launch: Launch, n_experts: int, top_k: int) -> None:
    check_route(launch, n_experts, top_k)


@pytest.mark.parametrize("dim", [40, 2560, 33, 34, 36, 7])
@pytest.mark.parametrize("kernel", ["mm_gather", "mm_gather_h"])
def test_gather(launch: Launch, kernel: str, dim: int) -> None:
    check_gather(launch, kernel, dim)


@pytest.mark.parametrize("ffn", [640, 70, 33, 3, 1028])
def test_activation_by_rows(launch: Launch, ffn: int) -> None:
    check_act(launch, ffn)


@pytest.mark.parametrize("dim", [40, 300, 2560])
def test_combine_and_write(launch: Launch, dim: int) -> None:
    check_combine(launch, dim)


@pytest.mark.parametrize("order", ["ascending", "reversed"])
def test_no_kernel_depends_on_the_order_of_threads(order: str) -> None:
    """The other tests run shuffled."""
    emulator = _core.open_device("emulator", threads=1, order=order, guard=True)

    def launch(kernel: str, args: bytes, buffers: list[Array], grid: Any) -> None:
        _core.run_kernel(emulator, kernel, args, buffers, list(grid))

    check_dense(launch, "IQ2_XS", 37, 70, 256)
    check_fp32(launch, TILES[2], 17, 33, 50)
    check_route(launch, 100, 3)
    check_gather(launch, "mm_gather_h", 40)
    check_act(launch, 70)
    check_combine(launch, 300)
