"""The CUDA device itself: memory, errors, grids, the cache of compiled kernels."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

CLEAR = "mm_clear"


def plan_args(max_rows: int) -> bytes:
    return struct.pack("<9I", 1, 8, 1, 16, 1, 1, max_rows, 1, 1)


def clear(gpu: Any, n_rows: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    from expertile import _core

    rows, weights = np.full(n_rows, 7, np.int32), np.full(n_rows, 7, np.float32)
    _core.run_kernel(gpu, CLEAR, plan_args(n_rows), [rows, weights], [-(-n_rows // 256), 1, 1])
    return rows, weights


def test_upload_and_read_give_the_same_bytes(gpu: Any) -> None:
    source = np.random.default_rng(0).integers(0, 256, 1_000_003, np.uint8)
    buffer = gpu.upload(source)
    got = np.empty_like(source)
    gpu.read(buffer, got)
    assert np.array_equal(got, source) and buffer.bytes == source.nbytes and buffer.address != 0


def test_a_kernel_runs(gpu: Any) -> None:
    rows, weights = clear(gpu, 1000)
    assert np.all(rows == -1) and np.all(weights == 0)


def test_out_of_memory_names_the_sizes_and_leaves_the_device_usable(gpu: Any) -> None:
    with pytest.raises(RuntimeError, match=rf"expected {1 << 50} bytes of device memory, got \d+ free of \d+"):
        gpu.alloc(1 << 50)
    assert np.all(clear(gpu, 300)[0] == -1)


def test_a_zero_grid_is_refused_and_leaves_the_device_usable(gpu: Any) -> None:
    from expertile import _core

    rows, weights = np.zeros(8, np.int32), np.zeros(8, np.float32)
    with pytest.raises(RuntimeError, match=r"mm_clear.*grid"):
        _core.run_kernel(gpu, CLEAR, plan_args(8), [rows, weights], [0, 1, 1])
    assert np.all(clear(gpu, 300)[0] == -1)


def test_args_of_another_size_are_refused(gpu: Any) -> None:
    from expertile import _core

    rows, weights = np.zeros(8, np.int32), np.zeros(8, np.float32)
    with pytest.raises(ValueError, match="args of 36 bytes"):
        _core.run_kernel(gpu, CLEAR, b"1234", [rows, weights], [1, 1, 1])


@pytest.mark.parametrize("n_tokens", [65_535, 65_536, 131_071])
def test_more_rows_of_threadgroups_than_cuda_has_on_y(gpu: Any, n_tokens: int) -> None:
    """mm_combine over one column chunk a token: y goes beyond 65,535."""
    from expertile import _core

    rng = np.random.default_rng(n_tokens)
    position = rng.permutation(n_tokens).astype(np.int32)
    weights = rng.standard_normal(n_tokens).astype(np.float32)
    y = rng.standard_normal((n_tokens, 3)).astype(np.float32)
    routed = np.full((n_tokens, 3), np.nan, np.float32)
    args = struct.pack("<3I", n_tokens, 1, 3)
    _core.run_kernel(gpu, "mm_combine", args, [position, weights, y, routed], [1, n_tokens, 1])
    assert np.array_equal(routed, np.float32(0) + weights[position][:, None] * y[position])


SCRIPT = """
import sys; sys.path[:0] = {path!r}
import time, numpy as np, struct, expertile
from expertile import _core
gpu = expertile.open_device("cuda")
rows, weights = np.full(300, 7, np.int32), np.full(300, 7, np.float32)
began = time.perf_counter()
_core.run_kernel(gpu, "mm_clear", struct.pack("<9I", 1, 8, 1, 16, 1, 1, 300, 1, 1), [rows, weights], [2, 1, 1])
assert np.all(rows == -1) and np.all(weights == 0)
"""


def run_with_cache(cache: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    script = SCRIPT.format(path=sys.path)
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_compiled_kernels_are_kept_on_disk_and_damaged_ones_made_again(gpu: Any, tmp_path: Path) -> None:
    run_with_cache(tmp_path)
    files = list((tmp_path / "expertile" / "cuda").iterdir())
    assert [file.suffix for file in files] == [".bin"]
    whole = files[0].read_bytes()
    written = files[0].stat().st_mtime_ns
    run_with_cache(tmp_path)
    assert files[0].stat().st_mtime_ns == written
    # A byte of the code, the end cut off, and a whole file that holds no machine code.
    for damaged in (whole[:100] + bytes([whole[100] ^ 1]) + whole[101:], whole[:-1], b"", b"EXPTCUB1"):
        files[0].write_bytes(damaged)
        run_with_cache(tmp_path)
        assert files[0].read_bytes() == whole


def test_a_cache_that_cannot_be_written_is_no_error(gpu: Any, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    run_with_cache(blocked)
