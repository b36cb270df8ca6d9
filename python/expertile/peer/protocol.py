"""Frames between a bench and its peer process: a line of JSON, then as many bytes as it says.

    {"op": ..., "arrays": [{"dtype": "float32", "shape": [2, 3]}, ...], ...}\n<bytes of the arrays, one after the other>

A reply has "ok": true, or "ok": false and "error": a text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
PIECE = 1 << 22  # bytes written at a time


class Stream(Protocol):
    """What of a binary file a frame needs."""

    def write(self, data: Any, /) -> Any: ...
    def flush(self) -> None: ...
    def readline(self) -> bytes: ...
    def readinto(self, into: Any, /) -> int | None: ...


def write_frame(stream: Stream, fields: dict[str, Any], arrays: Sequence[Array] = ()) -> None:
    """Writes `fields` and the arrays' bytes, without copying them."""
    packed = [np.ascontiguousarray(array) for array in arrays]
    shapes = [{"dtype": array.dtype.name, "shape": list(array.shape)} for array in packed]
    stream.write(json.dumps({**fields, "arrays": shapes}).encode() + b"\n")
    for array in packed:
        raw = array.reshape(-1).view(np.uint8).data
        for start in range(0, len(raw), PIECE):
            stream.write(raw[start : start + PIECE])
    stream.flush()


def read_frame(stream: Stream) -> tuple[dict[str, Any], list[Array]]:
    """The next frame. EOFError where the stream ends before or inside it, ValueError where it is no frame."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        raise EOFError("[peer] expected a frame, got the end of the stream")
    fields = json.loads(line)
    if not isinstance(fields, dict) or "arrays" not in fields:
        raise ValueError(f"[peer] expected a frame, got {line[:80]!r}")
    arrays = []
    for entry in fields.pop("arrays"):
        array = np.empty([int(size) for size in entry["shape"]], np.dtype(entry["dtype"]))
        raw = array.reshape(-1).view(np.uint8).data
        done = 0
        while done < len(raw):
            count = stream.readinto(raw[done:])
            if not count:
                raise EOFError(f"[peer] expected {len(raw)} bytes of an array, got {done}")
            done += count
        arrays.append(array)
    return fields, arrays
