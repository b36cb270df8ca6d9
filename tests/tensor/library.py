"""The tensor library's kernels for the emulator: the same .metal files, with matmul2d in place of simdgroup_matrix.

Built here and not shipped: kernels of the same names, for the tests alone. Six formats stand for the twenty: the bodies
differ by whether a format has quant blocks, and these are the ones of the product's model and of the traps.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from emulator.build import ROOT, link

METAL = ROOT / "metal"
sys.path.insert(0, str(METAL))

import emit  # noqa: E402
from lowering import HOST  # noqa: E402
from signatures import Source, preprocess, read_source  # noqa: E402

FORMS = ("staged", "k4")
FORMATS = ("Q8_0", "IQ2_XS", "IQ4_NL", "Q2_0", "F16", "F32")
NAMES = re.compile(rf"gemm_.*_({'|'.join(name.lower() for name in FORMATS)}|fp32)_\d+_\d+_\d+_\d+(_gatherless)?")


def defines(form: str) -> list[str]:
    return ["-DEXPERTILE_METAL_TENSOR=1", f"-DEXPERTILE_METAL_K4={FORMS.index(form)}"]


def tensor_source(path: Path, form: str) -> Source:
    includes = [METAL / "include", METAL / "portability" / "preprocess"]
    text = preprocess(" ".join(["g++", *defines(form)]), path, METAL, includes)
    return read_source(text, f"kernels/{path.name}")


def write_units(folder: Path, paths: list[Path], form: str, names: re.Pattern[str], count: int) -> None:
    """Every kernel of the files whose name matches, in `count` units a file, and their table."""
    units = []
    for path in paths:
        source = tensor_source(path, form)
        text = emit.lowered_text(source, HOST)
        kernels = [kernel for kernel in source.kernels if names.fullmatch(kernel.name)]
        for i in range(count):
            units.append(f"lowered_{path.stem}_{i}")
            unit = emit.unit_text(source, units[-1], text, kernels[i::count])
            (folder / f"{units[-1]}.cpp").write_text(unit)
    (folder / "kernels_table.cpp").write_text(emit.table_text(units))


def build_gemms(folder: Path, form: str) -> Path:
    folder.mkdir()
    write_units(folder, [METAL / "kernels" / f"{stem}.metal" for stem in ("gemm", "hyper")], form, NAMES, 2)
    return link(folder, defines(form))


def build_traps(folder: Path) -> Path:
    folder.mkdir()
    write_units(folder, [Path(__file__).parent / "kernels" / "traps.metal"], "k4", re.compile(".*"), 1)
    return link(folder, defines("k4"))
