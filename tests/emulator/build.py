"""Lowered kernels and the emulator as a library of their own, and its launches through ctypes."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
DEVICES = ROOT / "cpp" / "devices"
FLAGS = ["-std=c++20", "-O1", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-ftls-model=initial-exec"]
FLAGS += ["-Wall", "-Wextra"]
INCLUDES = [f"-I{path}" for path in (ROOT / "cpp", ROOT / "cpp" / "include", ROOT / "metal" / "portability")]


class Call(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_char_p),
        ("order", ctypes.c_char_p),
        ("seed", ctypes.c_uint64),
        ("threads", ctypes.c_int32),
        ("n_buffers", ctypes.c_uint32),
        ("args", ctypes.c_void_p),
        ("args_bytes", ctypes.c_uint64),
        ("data", ctypes.POINTER(ctypes.c_void_p)),
        ("bytes", ctypes.POINTER(ctypes.c_uint64)),
        ("written", ctypes.c_char_p),
        ("grid", ctypes.c_uint32 * 3),
        ("indirect", ctypes.c_int32),
        ("max_grid", ctypes.c_uint32 * 3),
    ]


def link(folder: Path, flags: Sequence[str] = ()) -> Path:
    """Compiles the units and the table of `folder` and links them with the emulator and the driver."""
    sources = [*DEVICES.glob("emulator/*.cpp"), DEVICES / "host_buffer.cpp", DEVICES / "launch_check.cpp"]
    sources.append(ROOT / "cpp" / "core" / "program.cpp")
    sources += [folder / "kernels_table.cpp", HERE / "driver.cpp"]
    all_in_one = folder / "all_in_one.cpp"  # the standard headers are read once
    all_in_one.write_text("".join(f'#include "{source}"\n' for source in sources))

    def compile_one(source: Path) -> str:
        target = source.with_suffix(".o")
        subprocess.run(["g++", *FLAGS, *flags, *INCLUDES, "-c", str(source), "-o", str(target)], check=True)
        return str(target)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, [all_in_one, *sorted(folder.glob("lowered_*.cpp"))]))
    library = folder / "libkernels.so"
    subprocess.run(["g++", "-shared", "-o", str(library), *objects, "-lpthread"], check=True)
    return library


def load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.run_case.restype = ctypes.c_char_p
    return library


def run_case(
    library: ctypes.CDLL,
    kernel: str,
    args: bytes,
    buffers: Sequence[tuple[npt.NDArray[np.generic], bool]],
    grid: Sequence[int],
    *,
    order: str = "ascending",
    seed: int = 1,
    threads: int = 1,
    indirect: int = -1,
    max_grid: Sequence[int] | None = None,
) -> str:
    """Runs one launch; `buffers` are (array, written). Returns the error's text."""
    n = len(buffers)
    assert all(array.flags.c_contiguous for array, _ in buffers)
    packed = np.frombuffer(args, np.uint8)
    data = (ctypes.c_void_p * n)(*[array.ctypes.data for array, _ in buffers])
    sizes = (ctypes.c_uint64 * n)(*[array.nbytes for array, _ in buffers])
    written = bytes(int(flag) for _, flag in buffers)
    largest = (ctypes.c_uint32 * 3)(*(max_grid or grid))
    record = Call(
        kernel.encode(), order.encode(), seed, threads, n, packed.ctypes.data, len(args), data, sizes, written,
        (ctypes.c_uint32 * 3)(*grid), indirect, largest,
    )  # fmt: skip
    text = library.run_case(ctypes.byref(record))
    assert isinstance(text, bytes)
    return text.decode()
