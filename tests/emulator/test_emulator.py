"""The emulator against small kernels: right ones give plain numpy's results in every order, wrong ones an error."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulator.build import HERE, ROOT, link, load, run_case

ORDERS = ("ascending", "reversed", "shuffled")

Run = Callable[..., str]


def build(out: Path) -> Path:
    """Lowers the fixture's kernels and links them with the emulator."""
    reflect = [sys.executable, str(ROOT / "metal" / "reflect.py"), "--compiler", "g++", "--out", str(out)]
    reflect += ["--kernels", str(HERE / "kernels"), "--include", str(ROOT / "metal" / "include")]
    subprocess.run(reflect, check=True)
    return link(out)


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    library = load(build(tmp_path_factory.mktemp("emulator")))

    def call(
        kernel: str,
        args: tuple[int, ...],
        *buffers: tuple[np.ndarray, bool],
        grid: tuple[int, int, int] = (1, 1, 1),
        max_grid: tuple[int, int, int] = (1, 1, 1),
        **options: Any,
    ) -> str:
        return run_case(
            library, kernel, np.array(args, np.uint32).tobytes(), buffers, grid, max_grid=max_grid, **options
        )

    return call


def words(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, n, dtype=np.uint32)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("order", ORDERS)
def test_barrier(run: Run, order: str, threads: int) -> None:
    x, y = words(64 * 7), np.zeros(64 * 7, np.uint32)
    assert run("reverse", (5, 0), (x, False), (y, True), grid=(7, 1, 1), order=order, threads=threads) == ""
    np.testing.assert_array_equal(y.reshape(7, 64), x.reshape(7, 64)[:, ::-1] + 5)


def test_missing_barrier_shows(run: Run) -> None:
    for order in ORDERS:
        x, y = words(64), np.zeros(64, np.uint32)
        assert run("reverse_without_barrier", (5, 0), (x, False), (y, True), order=order) == ""
        assert (y != x[::-1] + 5).any()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (0, "returned"),
        (1, "barrier of kernels/cases.metal:"),
        (2, "simd_sum of kernels/cases.metal:"),
        (3, "lane"),
        (4, "buffer y] expected writes within its 256 bytes, got one at byte 256"),
        (5, "matrix calls"),
        (7, "simd_max of kernels/cases.metal:"),
    ],
)
def test_faults(run: Run, choice: int, message: str, order: str) -> None:
    y = np.zeros(64, np.uint32)
    error = run("faults", (64, choice), (y, True), order=order)
    assert error.startswith("DeviceError: [kernel faults,")
    assert message in error
    assert run("faults", (64, 6), (y, True), order=order) == ""  # the device is still good


def test_whole_simdgroups_may_part(run: Run) -> None:
    y = np.zeros(64, np.uint32)
    assert run("faults", (64, 6), (y, True)) == ""
    np.testing.assert_array_equal(y, [sum(range(32))] * 32 + [63] * 32)


def test_threadgroup_memory(run: Run) -> None:
    y = np.zeros(32, np.uint32)
    short = run("memory_fits", (9,), (y, True))
    assert short == "invalid_argument: [kernel memory_fits] expected args of 8 bytes, got 4"
    assert run("memory_fits", (9, 0), (y, True), grid=(3, 1, 1)) == ""
    assert y[0] == 9
    assert (y[1:] == 0xFFA5FFA5).all()  # never written: garbage, also in the last threadgroup
    line = (HERE / "kernels" / "cases.metal").read_text().splitlines().index("  threadgroup uchar bytes[BYTES];") + 1
    assert f"cases.metal:{line}] expected writes within the 1000" in run("memory_overrun", (9, 0), (y, True))
    assert "expected threadgroup memory of at most 32768 bytes" in run("memory_too_large", (9, 0), (y, True))


@pytest.mark.parametrize("order", ORDERS)
def test_simd_operations(run: Run, order: str) -> None:
    x, y = words(64), np.zeros((13, 64), np.uint32)
    assert run("simd_operations", (4, 0), (x, False), (y, True), order=order) == ""
    lane = np.arange(32)
    for group in range(2):
        v, got = x[group * 32 :][:32], y[:, group * 32 :][:, :32]
        inclusive = np.cumsum(v, dtype=np.uint32)
        bits = np.uint32(sum(int(value & 1) << i for i, value in enumerate(v)))
        expected = [
            np.full(32, v.sum()), np.full(32, v.max()), np.full(32, v.min()), inclusive - v, inclusive,
            v[lane * 7 % 32], v[lane ^ 5], np.where(lane < 3, v, v[lane - 3]),
            np.where(lane > 28, v, v[(lane + 3) % 32]), np.full(32, v[4]), np.full(32, v[0]), np.full(32, bits),
            np.full(32, 2 * int((v != 0).all()) + int((v == x[0]).any())),
        ]  # fmt: skip
        np.testing.assert_array_equal(got, np.array(expected, np.uint32))


@pytest.mark.parametrize("transpose", [0, 1])
@pytest.mark.parametrize(("kernel", "dtype"), [("matrices_half", np.float16), ("matrices_float", np.float32)])
def test_matrices(run: Run, kernel: str, dtype: type, transpose: int) -> None:
    rng = np.random.default_rng(3)
    a = rng.integers(-8, 8, (8, 11)).astype(dtype)  # 11: a row is longer than the matrix
    b = rng.integers(-2, 3, (8, 8)).astype(dtype)
    c, d = rng.standard_normal((8, 8), np.float32), np.zeros((8, 8), dtype)
    left, right = a[:, :8].astype(np.float32), (b.T if transpose else b).astype(np.float32)
    chain = c.copy()
    for k in range(8):
        chain += left[:, k : k + 1] * right[k]
    product = left @ right
    product[:, ::2] += 1  # each lane's first element
    assert run(kernel, (11, transpose), (a, False), (b, False), (c, True), (d, True)) == ""
    np.testing.assert_array_equal(c, chain)
    np.testing.assert_array_equal(d, (product @ right).T.astype(dtype))


@pytest.mark.parametrize("threads", [1, 4])
def test_atomics_across_threadgroups(run: Run, threads: int) -> None:
    x, counts, bounds = words(5000), np.zeros(8, np.uint32), np.array([1 << 30, -1], np.int32)
    error = run("bins", (5000, 0), (x, False), (counts, True), (bounds, True), grid=(53, 1, 1), threads=threads)
    assert error == ""
    np.testing.assert_array_equal(counts, np.bincount(x % 8, minlength=8))
    np.testing.assert_array_equal(bounds, [x.min(), x.max()])


def test_half(run: Run) -> None:
    h = np.arange(65536, dtype=np.uint16).view(np.float16)
    rng = np.random.default_rng(4)
    x = rng.integers(0, 1 << 32, 65536, dtype=np.uint64).astype(np.uint32).view(np.float32)
    x[:30000] = (rng.standard_normal(30000) * 2.0 ** rng.integers(-26, 17, 30000)).astype(np.float32)
    x[40000:40100] = (np.arange(100, dtype=np.float32) + 0.5) * np.float32(2.0**-24)  # ties among the subnormals
    x[41000:41100] = 2048 + np.arange(100, dtype=np.float32)  # ties
    y, z, s = np.zeros(65536, np.float32), np.zeros(65536, np.float16), np.zeros((65536, 4), np.float16)
    buffers = ((h, False), (x, False), (y, True), (z, True), (s, True))
    assert run("halves", (65536, 0), *buffers, grid=(512, 1, 1)) == ""
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(y, h.astype(np.float32))
        np.testing.assert_array_equal(z, x.astype(np.float16))
        b = h[::-1]
        np.testing.assert_array_equal(s[:, 0], h + b)
        np.testing.assert_array_equal(s[:, 1], h * b)
        np.testing.assert_array_equal(s[:, 2], h / b)
        exact = h.astype(np.longdouble) * b.astype(np.longdouble) + np.longdouble(1.5)
        np.testing.assert_array_equal(s[:, 3], exact.astype(np.float16))
    assert np.signbit(y[0x8000]) and not np.signbit(y[0])


def test_launch_is_checked(run: Run) -> None:
    x, y = words(64), np.zeros(64, np.uint32)
    assert "expected a kernel of metal/kernels, got nothing" in run("nothing", (5, 0), (x, False), (y, True))
    assert run("reverse", (5, 0), (x, False)) == "invalid_argument: [kernel reverse] expected 2 buffers, got 1"
    assert "expected buffer x (data0) read, got a write" in run("reverse", (5, 0), (x, True), (y, True))
    assert "expected buffer y (data1) written, got a read" in run("reverse", (5, 0), (x, False), (y, False))
    empty = np.zeros(0, np.uint32)
    assert run("reverse", (5, 0), (empty, False), (y, True)).startswith("DeviceError: [kernel reverse] expected bytes")
    zero_grid = run("reverse", (5, 0), (x, False), (y, True), grid=(1, 0, 1))
    assert zero_grid == "DeviceError: [kernel reverse] expected a grid of at least (1, 1, 1), got (1, 0, 1)"
    sideways = run("reverse", (5, 0), (x, False), (y, True), order="sideways")
    assert sideways.startswith("invalid_argument: [emulator order] expected ascending, reversed or shuffled")


def test_indirect_grid(run: Run) -> None:
    x, y = words(256), np.zeros(256, np.uint32)
    x[:3] = (2, 1, 1)
    assert run("reverse", (0, 0), (x, False), (y, True), indirect=0, max_grid=(4, 1, 1)) == ""
    np.testing.assert_array_equal(y.reshape(4, 64)[:2], x.reshape(4, 64)[:2, ::-1])
    assert not y[128:].any()
    for grid in ((5, 1, 1), (0, 1, 1)):
        x[:3] = grid
        error = run("reverse", (0, 0), (x, False), (y, True), indirect=0, max_grid=(4, 1, 1))
        assert error == f"DeviceError: [kernel reverse, indirect grid] expected (1, 1, 1) to (4, 1, 1), got {grid}"
