"""The stand-in names every misuse of Metal: each is planted once."""

from __future__ import annotations

import re
from typing import Any

import pytest

# misuse: what the stand-in says of it
NAMED = {
    "missing buffer": r"kernel mm_clear: buffer sw at index 2 is missing",
    "missing args": r"kernel mm_clear: buffer args at index 0 is missing",
    "args of another size": r"kernel mm_clear: args of 8 bytes, not 36",
    "too many args": r"setBytes: 4097 bytes, 1 to 4096 are allowed",
    "wrong index": r"kernel mm_clear: nothing is declared at index 3",
    "index beyond the last": r"setBuffer: index 31, the last is 30",
    "offset beyond the end": r"setBuffer: offset 1200 of a buffer of 1200 bytes at index 1",
    "offset of two bytes": r"setBuffer: offset 2 is not a multiple of 4",
    "too many threads": r"kernel mm_clear: 2048 threads a threadgroup, the pipeline allows 1024",
    "other threads than declared": r"kernel mm_clear: threadgroups of \(128, 1, 1\) threads, declared are 256",
    "zero grid": r"dispatchThreadgroups: a grid of \(0, 1, 1\)",
    "grid beyond 32 bits": r"dispatchThreadgroups: a grid of \(4294967296, 1, 1\)",
    "indirect grid beyond its buffer": r"IndirectBuffer: offset 1192 of a buffer of 1200 bytes",
    "no pipeline": r"a dispatch without a pipeline",
    "commit before endEncoding": r"commit before endEncoding",
    "commit twice": r"commit of a command buffer that is committed already",
    "encoder after its end": r"setBytes after endEncoding",
    "endEncoding twice": r"endEncoding after endEncoding",
    "two encoders at once": r"another encoder is open: endEncoding is missing",
    "encoder after commit": r"computeCommandEncoder after commit",
    "wait before commit": r"waitUntilCompleted before commit",
    "GPU time before the end": r"GPUStartTime before the command buffer has completed",
    "never waited for": r"a command buffer was committed and never waited for",
    "missing barrier": r"no memoryBarrier between kernel mm_clear \(stok\) and kernel mm_clear \(stok\)",
    "missing barrier, overlapping ranges": r"no memoryBarrier between kernel mm_clear \(stok\)",
    "barrier of another scope": r"memoryBarrier: scope 2 is not buffers",
    "buffer too small for its kernel": r"kernel mm_clear wrote at byte 1196 of a buffer of 1196",
    "buffer freed before the GPU ran": r"kernel mm_clear: a buffer was freed before the GPU used it",
    "no bytes": r"newBufferWithLength: 0 bytes",
    "beyond maxBufferLength": r"newBufferWithLength: more than maxBufferLength",
    "private storage": r"resource options 32, not shared storage",
    "no copy of a pointer inside a page": r"newBufferWithBytesNoCopy: the pointer is not page-aligned",
    "no copy of part of a page": r"newBufferWithBytesNoCopy: the length is not a multiple of the page",
    "no copy of memory that is not there": r"newBufferWithBytesNoCopy: the range is not mapped memory",
    "write into read-only memory": r"kernel mm_clear: buffer stok is written, its memory may only be read",
    "pointer to a buffer that is not resident": r"gemm_grouped_\w+: entry 0 of table points to a buffer that is not r",
    "host pointer for a GPU address": r"gemm_grouped_\w+: entry 0 of table points to no buffer",
    "leaked buffer": r"leak: the device's last reference is gone, alive are 1 MTLBuffer",
    "autorelease without a pool": r"autorelease of a NSString without a pool",
    "release too many": r"release of a freed MTLBuffer",
    "message to a freed object": r"message contents to a freed MTLBuffer",
    "message to nil": r"message length to nil",
    "unknown selector": r"unrecognized selector -\[MTLDevice newHeapWithDescriptor:\]",
    "fast math": r"newLibraryWithSource: fast math is on",
    "no options": r"newLibraryWithSource: no options, so fast math",
    "no language version": r"newLibraryWithSource: no language version was set",
    "base library as Metal 4.0": r"newLibraryWithSource: the base library as Metal 4\.0",
    "tensor library as Metal 3.1": r"use of undeclared identifier 'tensor' before Metal 4\.0",
    "include that nobody resolves": r'fatal error: "args\.h" file not found',
    "another text": r"newLibraryWithSource: the text is none of the embedded sources",
    "kernel that is not there": r"a pipeline's descriptor without a function",
}
RIGHT = ("nothing", "pointer to a resident buffer")


def said(standin: Any, name: str) -> str:
    thrown = ""
    try:
        standin.plant(name)
    except RuntimeError as error:
        thrown = str(error)
    return "\n".join([thrown, *standin.take_faults()]).strip()


@pytest.mark.parametrize("name", NAMED)
def test_misuse_is_named(standin: Any, name: str) -> None:
    assert re.search(NAMED[name], said(standin, name)), said(standin, name)


@pytest.mark.parametrize("name", RIGHT)
def test_right_use_is_no_fault(standin: Any, name: str) -> None:
    before = standin.living()
    assert said(standin, name) == ""
    assert standin.living() == before


def test_every_plant_is_tested(standin: Any) -> None:
    assert sorted(standin.plants()) == sorted([*NAMED, *RIGHT])
