"""The products by matrix tiles (AMX), with a model of the tile instructions: any x86-64 machine with AVX2 runs them."""

from __future__ import annotations

import ctypes
import platform
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cases import random_weight
from kernel_checks import matrix_of, row_bytes

from expertile import _core, quants
from expertile.layer_weights import WeightArray
from expertile.measure import assert_bitwise_equal

Array = npt.NDArray[Any]
HERE = Path(__file__).parent
CPP = HERE.parent.parent / "cpp"
# The formats whose decoders need no grid; F16 and BF16 rows may end anywhere.
TYPES = [name for name in quants.TYPES if not name.startswith(("IQ2", "IQ3"))]
BOUNDS = {"exact": 1e-6, "bf16": 4e-3}


def has_avx2() -> bool:
    """Whether this machine compiles for and runs AVX2."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    return _core.cpu_instructions().count("avx2") == 1


pytestmark = pytest.mark.skipif(not has_avx2(), reason="the model's decoders are those of AVX2")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    out = tmp_path_factory.mktemp("tiles") / "tiles.so"
    devices = CPP / "devices" / "cpu"
    sources = [
        devices / "kernels_amx.cpp",
        devices / "panel_gemm.cpp",
        CPP / "core" / "tensor.cpp",
        HERE / "driver.cpp",
    ]
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-ffp-contract=off", "-mavx2", "-mfma", "-mf16c"]
    flags += ['-DEXPERTILE_TILE_MODEL="tile_model.h"', f"-I{HERE}", f"-I{CPP}", f"-I{CPP / 'include'}"]
    subprocess.run(["g++", *flags, *map(str, sources), "-o", str(out)], check=True)
    return ctypes.CDLL(str(out))


def product(
    library: ctypes.CDLL,
    weight: Any,
    x: Array,
    precision: str,
    first: int = 0,
    count: int = -1,
    mixed: bool = False,
    together: int = 1,
) -> Array:
    n_rows, n_inner = x.shape
    count = n_rows - first if count < 0 else count
    n_weights = weight.shape[1]
    sums = np.full((count, n_weights), np.nan, np.float32)
    x = np.ascontiguousarray(x)
    library.tile_product(
        int(mixed),
        weight.type.encode(),
        int(precision == "bf16"),
        ctypes.c_void_p(weight.data.ctypes.data),
        ctypes.c_uint64(row_bytes(weight)),
        n_weights,
        ctypes.c_void_p(x.ctypes.data),
        *map(ctypes.c_uint64, (n_rows, n_inner, first, count)),
        ctypes.c_void_p(sums.ctypes.data),
        ctypes.c_uint64(together),
    )
    return sums


def case(type_name: str, n_inner: int, n_weights: int, n_rows: int, seed: int) -> tuple[Any, Array]:
    rng = np.random.default_rng(seed)
    return random_weight(type_name, (n_inner, n_weights), rng), rng.standard_normal((n_rows, n_inner)).astype(
        np.float16
    )


@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("type_name", TYPES)
def test_every_format(library: ctypes.CDLL, type_name: str, precision: str) -> None:
    """One row, a tile of them, and more than a pass; weights that fill a group, half of one, and more."""
    n_inner = 768 if quants.type_info(type_name).elements > 1 else 588
    weight, x = case(type_name, n_inner, 41, 35, 1)
    got = product(library, weight, x, precision)
    want = x.astype(np.float64) @ matrix_of(weight).T
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert error <= BOUNDS[precision], f"{error:.2e}"
    loses = precision == "bf16" and type_name != "BF16"
    assert not loses or error > 5e-5, "rounded weights lose something"


@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("n_inner", [32, 96, 256, 288, 512, 2560])
def test_a_row_does_not_depend_on_its_neighbours(library: ctypes.CDLL, n_inner: int, precision: str) -> None:
    weight, x = case("Q8_0", n_inner, 40, int(library.max_rows()), 2)
    x[5, 3] = np.nan
    whole = product(library, weight, x, precision)
    assert np.isnan(whole[5]).all() and np.isfinite(np.delete(whole, 5, axis=0)).all()
    for n_rows in (1, 2, 3, 10, 16, 17, 31, 32, 33, 40, 80):
        assert_bitwise_equal(product(library, weight, x[:n_rows], precision), whole[:n_rows], f"{n_rows} rows")
    for first, count in ((16, 1), (16, 40), (32, 64), (80, 16)):
        part = product(library, weight, x, precision, first, count)
        assert_bitwise_equal(part, whole[first : first + count], f"rows {first} .. {first + count}")


def test_integers_are_exact(library: ctypes.CDLL) -> None:
    """Halves of up to 11 bits: their two parts and all four products count."""
    rng = np.random.default_rng(3)
    n_inner = 300
    values = rng.integers(-127, 128, (20, n_inner)).astype(np.float16)
    values[:, 0] = 2047
    weight = WeightArray("F16", (n_inner, 20), values.view(np.uint8).reshape(-1))
    x = rng.integers(-127, 128, (18, n_inner)).astype(np.float16)
    x[:, 0] = -1023
    assert (np.abs(x).astype(np.int64) @ np.abs(values).astype(np.int64).T).max() < 2**24
    want = x.astype(np.int64) @ values.astype(np.int64).T
    assert_bitwise_equal(product(library, weight, x, "exact"), want.astype(np.float32), "sums")


@pytest.mark.parametrize("n_rows", [4, 5, 96])
@pytest.mark.parametrize("n_inner", [640, 768, 1312])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_panel_holds_the_weights_that_must_come_together(
    library: ctypes.CDLL, mixed: bool, n_inner: int, n_rows: int
) -> None:
    """A column of gemm_hc_up has a weight row of each of up to 16 streams: twice a panel, whose sums lay behind it."""
    weight, x = case("IQ4_NL", n_inner, 40, n_rows, 4)
    want = product(library, weight, x, "exact", mixed=mixed)
    assert np.isfinite(want).all()
    for together in (9, 16):
        got = product(library, weight, x, "exact", mixed=mixed, together=together)
        assert_bitwise_equal(got, want, f"{together} weights")
