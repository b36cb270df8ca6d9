"""A check that cannot fail proves nothing: kernels with one planted fault each must fail the checks they go through.

Copies of the .metal files, with a fault in each kernel named here, are lowered and compiled as the real ones are.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from emulator.build import ROOT, link, load, run_case
from kernel_checks import (
    TILES,
    Array,
    Launch,
    check_act,
    check_combine,
    check_dense,
    check_gather,
    check_integers,
    check_route,
)

from expertile import _core

METAL = ROOT / "metal"
READ_WEIGHTS = "weights.row(n), k + 8 * (unit % 4),"
STAGE_WEIGHT = "values[i][j / 4][j % 4] = T(y[j]);"


class Fault(NamedTuple):
    name: str
    file: str
    right: str
    wrong: str
    check: Callable[[Launch], object]
    message: str


def dense(tile: int) -> Callable[[Launch], object]:
    return lambda launch: check_dense(launch, "Q8_0", 19, 40, 96, TILES[tile : tile + 1])


# Kernels of two tiles have a fault of their own; the third tile's are left right.
FAULTS = [
    Fault(
        "the four parts of an inner step in reverse", "include/gemm_tile.h", READ_WEIGHTS,
        "weights.row(n), k + 8 * (count == 32 ? 3 - unit % 4 : unit % 4),", dense(0),
        "relative L2",
    ),
    Fault(
        "weights too large by a unit of half in the last place", "include/gemm_tile.h", STAGE_WEIGHT,
        "values[i][j / 4][j % 4] = T(S == 2 ? y[j] * 1.0007f : y[j]);", dense(1),
        "relative L2",
    ),
    Fault(
        "slots summed from the last to the first", "kernels/epilogue.metal", "const int row = slots[slot];",
        "const int row = slots[top_k - 1 - slot];", lambda launch: check_combine(launch, 300),
        r"\[routed\] expected equal bits",
    ),
    Fault(
        "padding rows taken for real", "kernels/epilogue.metal", "const bool padding = stok[row] < 0;",
        "const bool padding = false;", lambda launch: check_act(launch, 70),
        "padding rows are not zero",
    ),
    Fault(
        "ties to the highest id", "kernels/router.metal", "other_id < best_id", "other_id > best_id",
        lambda launch: check_route(launch, 100, 3), "not equal",
    ),
    Fault(
        "padding rows not cleared to their end", "kernels/gather.metal", "i < length; i += GATHER_THREADS",
        "i + 1 < length; i += GATHER_THREADS", lambda launch: check_gather(launch, "mm_gather_h", 33),
        "not equal",
    ),
]  # fmt: skip


def plant(folder: Path) -> None:
    """The .metal files and their includes with the faults; of the GEMMs, the few that are needed."""
    shutil.copytree(METAL / "include", folder / "include")
    (folder / "kernels").mkdir()
    for stem in ("gemm", "epilogue", "router", "gather"):
        shutil.copy(METAL / "kernels" / f"{stem}.metal", folder / "kernels")
    for fault in FAULTS:
        path = folder / fault.file
        text = path.read_text()
        assert fault.right in text, f"{fault.file} has changed: no {fault.right!r} to plant a fault in"
        path.write_text(text.replace(fault.right, fault.wrong, 1))
    gemm = folder / "kernels" / "gemm.metal"
    lines = [line for line in gemm.read_text().splitlines() if not line.startswith("EXPERTILE_EACH_")]
    lines += [f"EXPERTILE_TILE_KERNEL(gemm_dense, Q8_0, q8_0, {', '.join(map(str, tile))})" for tile in TILES[:3]]
    gemm.write_text("\n".join(lines) + "\n")


def build(folder: Path) -> Path:
    plant(folder)
    reflect = [sys.executable, str(METAL / "reflect.py"), "--compiler", "g++", "--out", str(folder), "--units", "1"]
    reflect += ["--kernels", str(folder / "kernels"), "--include", str(folder / "include")]
    subprocess.run(reflect, check=True)
    return link(folder, ["-w"])


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    library = load(build(tmp_path_factory.mktemp("wrong") / "metal"))
    kernels = _core.kernels()

    def run(kernel: str, args: bytes, buffers: list[Array], grid: Sequence[int]) -> None:
        written = [not is_const for _, is_const in kernels[kernel]["buffers"]]
        error = run_case(library, kernel, args, list(zip(buffers, written, strict=True)), grid, order="shuffled")
        if error:
            raise RuntimeError(error)

    return run


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_wrong_kernel_fails_its_check(launch: Launch, fault: Fault) -> None:
    with pytest.raises(AssertionError, match=fault.message):
        fault.check(launch)


def test_the_check_of_integers_fails_too(launch: Launch) -> None:
    for tile in TILES[:2]:
        with pytest.raises(AssertionError, match=r"\[y\] expected equal bits"):
            check_integers(launch, "Q8_0", tile)


def test_right_kernels_of_the_same_build_pass(launch: Launch) -> None:
    dense(2)(launch)
    check_integers(launch, "Q8_0", TILES[2])
