"""The cpu device's NEON loops, bit for bit beside the portable ones: on ARM as they are, elsewhere under QEMU.

No ARM machine has run them otherwise. What QEMU shows is their arithmetic, not their speed.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from expertile import quants

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
CPU = ROOT / "cpp" / "devices" / "cpu"
NATIVE = platform.machine() in ("aarch64", "arm64")
COMPILER = "c++" if NATIVE else "aarch64-linux-gnu-g++"
QEMU = "qemu-aarch64-static"
ROWS = [
    "exp_row",
    "sigmoid_row",
    "scale_row",
    "add_scaled_row",
    "add_product_row",
    "normalise_row",
    "square_sum",
    "bf16_row",
    "half_row",
    "round_row",
    "silu_half_row",
    "swiglu_half_row",
]

pytestmark = pytest.mark.skipif(
    shutil.which(COMPILER) is None or not (NATIVE or shutil.which(QEMU)),
    reason=f"needs {COMPILER}" + ("" if NATIVE else f" and {QEMU}"),
)


@pytest.fixture(scope="module")
def differing(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Values with other bits, by the name of the loop."""
    build = tmp_path_factory.mktemp("neon")
    out = build / "driver"
    metal = ROOT / "metal"
    reflect = [sys.executable, metal / "reflect.py", "--kernels", metal / "kernels", "--include", metal / "include"]
    subprocess.run([*map(str, reflect), "--out", str(build)], check=True)
    sources = [*sorted(CPU.glob("kernels*.cpp")), CPU / "grid_codes.cpp", ROOT / "cpp" / "core" / "tensor.cpp"]
    include = [ROOT / "cpp", ROOT / "cpp" / "include", metal / "include", metal / "portability", build]
    flags = ["-std=c++20", "-O1", "-ffp-contract=off", *(f"-I{path}" for path in include)]
    flags += [] if NATIVE else ["-static"]
    subprocess.run([COMPILER, *flags, *map(str, [*sources, HERE / "driver.cpp"]), "-o", str(out)], check=True)
    run = subprocess.run([*([] if NATIVE else [QEMU]), str(out)], check=True, capture_output=True, text=True)
    return {name: int(count) for name, count in (line.split() for line in run.stdout.splitlines())}


@pytest.mark.parametrize("name", [*quants.TYPES, *ROWS, "multiply", "multiply_fp32"])
def test_the_bits_of_the_portable_loops(differing: dict[str, int], name: str) -> None:
    assert differing[name] == 0


def test_nothing_is_compared_unseen(differing: dict[str, int]) -> None:
    assert set(differing) == {*quants.TYPES, *ROWS, "multiply", "multiply_fp32"}
