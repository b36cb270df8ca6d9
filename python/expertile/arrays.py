"""Arrays that a caller hands in, held to the dtype and shape that a call asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def checked(array: Any, dtype: Any, shape: Sequence[int | None], where: str) -> np.ndarray:
    """`array` as a C-contiguous array of exactly this dtype; None in `shape` is any size. Raises ValueError."""
    want = np.dtype(dtype)
    text = f"{want} [{', '.join('*' if n is None else str(n) for n in shape)}]"
    if not isinstance(array, np.ndarray):
        raise ValueError(f"[{where}] expected {text}, got {type(array).__name__}")
    fits = array.ndim == len(shape) and all(n in (None, m) for n, m in zip(shape, array.shape, strict=True))
    if array.dtype != want or not fits:
        raise ValueError(f"[{where}] expected {text}, got {array.dtype} {list(array.shape)}")
    return np.ascontiguousarray(array)


def checked_out(out: np.ndarray | None, shape: tuple[int, ...], where: str) -> np.ndarray:
    """What takes a float32 result of this shape: `out`, or a new array for None. Raises TypeError or ValueError."""
    if out is None:
        return np.empty(shape, np.float32)
    if not isinstance(out, np.ndarray) or out.dtype != np.float32:
        got = out.dtype if isinstance(out, np.ndarray) else type(out).__name__
        raise TypeError(f"[{where}: out] expected a float32 array, got {got}")
    if out.shape != shape or not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError(
            f"[{where}: out] expected a writable C-contiguous array {list(shape)}, got {list(out.shape)}, "
            f"contiguous {out.flags.c_contiguous}, writable {out.flags.writeable}"
        )
    return out
