"""The tensor library's GEMMs in the emulator, staged and K4: the checks that the base library's go through."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import test_single_kernels as single
from cases import random_weight
from emulator.build import load, run_case
from kernel_checks import TILES, Array, Launch, Tile, check_dense, check_fp32, check_integers, dense, matrix_of
from tensor import library
from tensor.test_traps import measured_order

from expertile import _core
from expertile.measure import assert_bitwise_equal

if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)


@pytest.fixture(scope="module")
def host() -> Any:
    """Runs the kernels that are no GEMM."""
    return _core.open_device("emulator", threads=1)


@pytest.fixture(scope="module")
def launch_of(tmp_path_factory: pytest.TempPathFactory, host: Any) -> Callable[[str], Launch]:
    """A form's launches. Elements lie in fours where the threads go ascending, else each by itself: both in turn."""
    signatures = _core.kernels()
    kernels = load(library.build_gemms(tmp_path_factory.mktemp("tensor") / "gemms"))

    def of(form: str) -> Launch:
        orders = itertools.cycle(["shuffled", "ascending"])

        def run(kernel: str, args: bytes, buffers: list[Array], grid: Sequence[int]) -> None:
            if not kernel.startswith("gemm_"):
                _core.run_kernel(host, kernel, args, buffers, list(grid))
                return
            written = [not is_const for _, is_const in signatures[kernel]["buffers"]]
            bound = list(zip(buffers, written, strict=True))
            assert run_case(kernels, f"{kernel}_{form}", args, bound, grid, order=next(orders), seed=3) == ""

        return run

    return of


@pytest.fixture(scope="module", params=library.FORMS)
def launch(request: pytest.FixtureRequest, launch_of: Callable[[str], Launch]) -> Launch:
    return launch_of(request.param)


@pytest.mark.parametrize("type_name", library.FORMATS)
def test_dense(launch: Launch, type_name: str) -> None:
    check_dense(launch, type_name, 37, 70, single.inner_size(type_name, 2))
    check_integers(launch, type_name, TILES[library.FORMATS.index(type_name) % len(TILES)])


@pytest.mark.parametrize(
    ("type_name", "n_inner"),
    [
        ("Q8_0", 32),
        ("Q8_0", 96),
        ("IQ4_NL", 640),
        ("Q2_0", 640),
        ("IQ2_XS", 2560),
        ("F16", 588),
        ("F16", 3),
        ("F32", 37),
    ],
)
def test_inner_and_output_sizes(launch: Launch, type_name: str, n_inner: int) -> None:
    for n_cols in (72, 1):
        check_dense(launch, type_name, 3, n_cols, n_inner, (TILES[0], TILES[3]))


@pytest.mark.parametrize(("type_name", "tile"), [*itertools.product(library.WHOLE, TILES), *library.GROUPED.items()])
def test_grouped(launch: Launch, host: Any, type_name: str, tile: Tile) -> None:
    single.test_grouped_gemm_gatherless_and_with_swiglu(host, launch, type_name, tile)


@pytest.mark.parametrize("type_name", library.WHOLE)
def test_shared_swiglu(launch: Launch, type_name: str) -> None:
    single.test_shared_swiglu_apart_by_vectors_and_fused(launch, type_name)


@pytest.mark.parametrize("type_name", library.WHOLE)
def test_low_rank_up(launch: Launch, type_name: str) -> None:
    single.test_low_rank_up_gates_and_averages_the_streams(launch, type_name, 3, single.inner_size(type_name, 1))


@pytest.mark.parametrize("tile", TILES)
def test_fp32(launch: Launch, tile: Tile) -> None:
    check_fp32(launch, tile, 17, 33, 50)


@pytest.mark.parametrize("type_name", library.FORMATS)
def test_both_forms_add_in_the_measured_order(launch_of: Callable[[str], Launch], host: Any, type_name: str) -> None:
    rng = np.random.default_rng(11)
    inner = single.inner_size(type_name, 2)
    x = rng.standard_normal((21, inner)).astype(np.float16)
    weight = random_weight(type_name, (inner, 40), rng)
    want = measured_order(x, matrix_of(weight).astype(np.float16))
    for form in library.FORMS:
        for tile in TILES:
            assert_bitwise_equal(dense(launch_of(form), x, weight, tile), want, f"{form} {tile}")

    def base(kernel: str, args: bytes, buffers: list[Array], grid: Sequence[int]) -> None:
        _core.run_kernel(host, kernel, args, buffers, list(grid))

    assert (dense(base, x, weight, TILES[0]) != want).any()  # another order, and so other bits


@pytest.mark.parametrize("form", library.FORMS)
@pytest.mark.parametrize("stem", ["gemm", "hyper"])
def test_the_tensor_library_has_the_same_kernels(stem: str, form: str) -> None:
    path = library.METAL / "kernels" / f"{stem}.metal"
    names = {kernel.name for kernel in library.tensor_source(path, form).kernels}
    assert names == {name for name, info in _core.kernels().items() if info["file"] == path.name}
