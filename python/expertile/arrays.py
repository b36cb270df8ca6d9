"""What a caller hands in, held to the type, dtype and shape that a call asks for."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np


def shown(value: Any) -> str:
    """`value` for the words of an error: as Python writes it, or its type where that is long or has several lines."""
    try:
        words = repr(value)
    except Exception:  # an int of more digits than Python writes, or whatever a caller's own __repr__ raises
        words = "\n"
    return words if len(words) <= 80 and words.isprintable() else f"an object of type {type(value).__name__}"


def whole(value: Any, low: int, high: int, where: str) -> int:
    """`value`, any kind of whole number, as an int of low..high. Raises ValueError."""
    try:
        number = None if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not low <= number <= high:
        raise ValueError(f"[{where}] expected {low}..{high}, got {shown(value)}")
    return number


def instance(value: Any, kind: type | tuple[type, ...], expected: str, where: str) -> Any:
    """`value`, which is an instance of `kind`. Raises TypeError."""
    if not isinstance(value, kind):
        raise TypeError(f"[{where}] expected {expected}, got {type(value).__name__}")
    return value


def text(value: Any, where: str) -> str:
    """`value`, a string that the engine can take and repeat. Raises TypeError, ValueError."""
    words = str(instance(value, str, "a string", where))
    if not words.isprintable():
        raise ValueError(f"[{where}] expected printable text, got {shown(words)}")
    return words


def flag(value: Any, where: str) -> bool:
    """`value`, True or False. Raises TypeError."""
    return bool(instance(value, (bool, np.bool_), "True or False", where))


def listed(value: Any, expected: str, where: str) -> list[Any]:
    """The items of `value`, which is no string. Raises TypeError."""
    scalar = isinstance(value, np.ndarray) and value.ndim == 0
    if scalar or isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise TypeError(f"[{where}] expected {expected}, got {type(value).__name__}")
    return list(value)


def checked_tile(tile: Any, where: str) -> tuple[int, int, int, int]:
    """A tile (M, N, K, S) of whole numbers. Raises ValueError."""
    numbers = list(tile) if isinstance(tile, (tuple, list)) or (isinstance(tile, np.ndarray) and tile.ndim) else []
    if len(numbers) != 4:
        raise ValueError(f"[{where}] expected a tile (M, N, K, S), got {shown(tile)}")
    rows, columns, inner, simdgroups = (whole(number, 1, 1 << 20, where) for number in numbers)
    return rows, columns, inner, simdgroups


def fits(shape: Sequence[int], want: Sequence[int | None]) -> bool:
    """Whether `shape` is what is wanted; None stands for any size."""
    return len(shape) == len(want) and all(n in (None, m) for n, m in zip(want, shape, strict=True))


def shape_text(want: Sequence[int | None]) -> str:
    """[33, *, 512]: any size is a star."""
    return f"[{', '.join('*' if n is None else str(n) for n in want)}]"


def checked(array: Any, dtype: Any, shape: Sequence[int | None], where: str) -> np.ndarray:
    """`array` as a C-contiguous array of exactly this dtype; None in `shape` is any size. Raises ValueError."""
    want = np.dtype(dtype)
    text = f"{want} {shape_text(shape)}"
    if not isinstance(array, np.ndarray):
        raise ValueError(f"[{where}] expected {text}, got {type(array).__name__}")
    if array.dtype != want or not fits(array.shape, shape):
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
