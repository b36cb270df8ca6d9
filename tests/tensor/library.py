"""The tensor library's kernels for the emulator: the same .metal files, with matmul2d in place of simdgroup_matrix.

Built here and not shipped: kernels of the same names, for the tests alone, and of all 460 those that differ in what is
new: every kernel and tile of a format with quant blocks and of one without, and for other formats, whose decoders alone
are others, the dense product in every tile and the grouped ones in one. They take 25 s to compile.
"""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path

from emulator.build import ROOT, link
from kernel_checks import TILES

METAL = ROOT / "metal"
sys.path.insert(0, str(METAL))

import emit  # noqa: E402
from lowering import HOST  # noqa: E402
from signatures import Kernel, Source, preprocess, read_source  # noqa: E402

TENSOR = "-DEXPERTILE_METAL_TENSOR=1"
FORMS = ("staged", "k4")
WHOLE = ("Q8_0", "F16")
GROUPED = {"IQ2_XS": TILES[1], "IQ4_NL": TILES[2], "Q2_0": TILES[3], "Q4_K": TILES[0]}
FORMATS = (*WHOLE, *GROUPED, "F32")
TILE = r"_\d+_\d+_\d+_\d+"
NAMES = [rf"gemm_.*_({'|'.join(WHOLE).lower()}|fp32){TILE}(_gatherless)?"]
NAMES += [rf"gemm_dense_({'|'.join(FORMATS).lower()}){TILE}"]
for name, tile in GROUPED.items():
    NAMES.append(rf"gemm_grouped(_swiglu)?_{'_'.join([name.lower(), *map(str, tile)])}(_gatherless)?")


def tensor_source(path: Path, form: str) -> Source:
    includes = [METAL / "include", METAL / "portability" / "preprocess"]
    text = preprocess(f"g++ {TENSOR} -DEXPERTILE_METAL_K4={FORMS.index(form)}", path, METAL, includes)
    return read_source(text, f"kernels/{path.name}")


def write_unit(folder: Path, name: str, source: Source, kernels: list[Kernel]) -> str:
    unit = emit.unit_text(source, name, emit.lowered_text(source, HOST), kernels)
    (folder / f"{name}.cpp").write_text(unit)
    return name


def build_gemms(folder: Path) -> Path:
    """Both forms in one library: the form is a suffix of the kernels' names there."""
    folder.mkdir()
    names, units = re.compile("|".join(NAMES)), []
    for form, stem in itertools.product(FORMS, ("gemm", "hyper")):
        source = tensor_source(METAL / "kernels" / f"{stem}.metal", form)
        kernels = [kernel for kernel in source.kernels if names.fullmatch(kernel.name)]
        for kernel in kernels:
            kernel.name += f"_{form}"
        units.append(write_unit(folder, f"lowered_{stem}_{form}", source, kernels))
    (folder / "kernels_table.cpp").write_text(emit.table_text(units))
    return link(folder, [TENSOR])


def write_traps(folder: Path, path: Path, names: str = ".*") -> Path:
    """The unit of traps.metal or of a copy of it."""
    source = tensor_source(path, "k4")
    kernels = [kernel for kernel in source.kernels if re.fullmatch(names, kernel.name)]
    unit = write_unit(folder, "lowered_traps", source, kernels)
    (folder / "kernels_table.cpp").write_text(emit.table_text([unit]))
    return folder / f"{unit}.cpp"


def build_traps(folder: Path) -> Path:
    folder.mkdir()
    write_traps(folder, Path(__file__).parent / "kernels" / "traps.metal")
    return link(folder, [TENSOR])
