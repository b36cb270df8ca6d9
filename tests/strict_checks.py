"""A .metal file for the strict check to read: a text with a planted fault, and its clean twin.

`//!` marks the line that the message must name. A text without a kernel gets one with its line as the body.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

METAL = Path(__file__).parent.parent / "metal"
sys.path.insert(0, str(METAL))

import strict  # noqa: E402

CLANG = shutil.which("clang++-19")
needs_clang = pytest.mark.skipif(CLANG is None, reason="needs clang++-19")

HEADER = "#include <metal_stdlib>\nusing namespace metal;\n"
ARGS = "struct A { uint n; };\n"
KERNEL = """[[kernel, max_total_threads_per_threadgroup(64)]] void f(
    constant A& args [[buffer(0)]], const device uint* x [[buffer(1)]], device uint* y [[buffer(2)]],
    uint t [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simd [[simdgroup_index_in_threadgroup]], uint2 group [[threadgroup_position_in_grid]]) {
BODY
}
"""
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
HEAD = """[[kernel, max_total_threads_per_threadgroup(64)]] void f(  //!
    constant A& args [[buffer(0)]], device uint* y [[buffer(1)]]"""


def whole(text: str) -> str:
    """A file from a body, from `functions --- body`, or from a text that has its kernel."""
    if "[[kernel" in text or "struct A" in text:
        return HEADER + text
    helpers, _, body = text.rpartition("---")
    return HEADER + ARGS + helpers + "\n" + KERNEL.replace("BODY", body)


def faults_of(tmp_path: Path, text: str, clang: str | None) -> str:
    """What the strict check says of a file of this text, a line a fault; types are checked where clang is given."""
    folder = tmp_path / "kernels"
    folder.mkdir(exist_ok=True)
    (folder / "t.metal").write_text(text)
    return "\n".join(strict.check_file(folder / "t.metal", METAL / "include", "c++", clang))


def check_pair(tmp_path: Path, bad: str, good: str, message: str, clang: str | None) -> None:
    """The clean twin passes; of the other the marked line is named, with the message."""
    clean = faults_of(tmp_path, whole(good), CLANG)
    assert clean == "", clean
    text = whole(bad)
    line = next(i for i, part in enumerate(text.splitlines(), 1) if "//!" in part)
    faults = faults_of(tmp_path, text, clang)
    assert re.search(rf"kernels/t\.metal:{line}:.*{re.escape(message)}", faults), faults
