"""Distances between what a device computed and what the reference says."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Anything = npt.NDArray[np.generic]


def _pair(where: str, got: npt.ArrayLike, want: npt.ArrayLike) -> tuple[Anything, Anything]:
    a, b = np.asarray(got), np.asarray(want)
    if a.shape != b.shape:
        raise ValueError(f"[{where}] expected shape {b.shape}, got {a.shape}")
    return a, b


def _distances(where: str, got: npt.ArrayLike, want: npt.ArrayLike, by_token: bool) -> npt.NDArray[np.float64]:
    """Relative L2 of every token (axis 0), or of the whole as one."""
    a, b = (np.asarray(array).astype(np.float64) for array in _pair(where, got, want))
    rows = (len(a), -1) if by_token and a.ndim and a.size else (1, -1)
    a, b = a.reshape(rows), b.reshape(rows)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    broken = np.any(~same & ~(np.isfinite(a) & np.isfinite(b)), axis=1)
    finite = np.isfinite(a) & np.isfinite(b)
    difference = np.linalg.norm(np.where(finite, a, 0.0) - np.where(finite, b, 0.0), axis=1)
    size = np.linalg.norm(np.where(finite, b, 0.0), axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(difference == 0.0, 0.0, difference / size)
    return np.asarray(np.where(broken, np.inf, ratio))


def rel_l2(got: npt.ArrayLike, want: npt.ArrayLike) -> float:
    """|got - want| / |want| over the whole array, in float64.

    got, want  any shape  float
    return     -          float  0 where they are equal (both zero included); inf where one has a NaN or an infinity
                                 that the other has not, or where want is all zero and got is not

    Errors: ValueError for unequal shapes.

    >>> rel_l2([3.0, 4.0], [3.0, 5.0]) == 1 / 34**0.5, rel_l2([np.nan, 1.0], [1.0, 1.0])
    (True, inf)
    """
    return float(_distances("rel_l2", got, want, by_token=False)[0])


def worst_token_rel_l2(got: npt.ArrayLike, want: npt.ArrayLike) -> tuple[float, int]:
    """The largest relative L2 of a token (axis 0), and that token; (0, -1) for no tokens.

    got, want  [T, ...]  float
    return     -         (float, int)

    >>> worst_token_rel_l2([[1.0, 0.0], [0.0, 2.0]], [[1.0, 0.0], [0.0, 1.0]])
    (1.0, 1)
    """
    if not np.asarray(want).size:
        _pair("worst_token_rel_l2", got, want)
        return 0.0, -1
    by_token = _distances("worst_token_rel_l2", got, want, by_token=True)
    token = int(np.argmax(by_token))
    return float(by_token[token]), token


def _bits(values: Anything) -> Anything:
    """The bits as unsigned integers, every NaN alike; other types as they are."""
    if values.dtype not in (np.float16, np.float32, np.float64):
        return values
    bits = np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}").reshape(values.shape).copy()
    bits[np.isnan(values)] = np.array(np.nan, values.dtype).view(bits.dtype)
    return bits


def differing(got: npt.ArrayLike, want: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Where two arrays differ in their bits. NaN equals NaN; an fp32 subnormal equals zeros and subnormals.

    +0 and -0 differ, and half subnormals are numbers like any other.

    got, want  any shape   one type
    return     same shape  bool

    Errors: ValueError for unequal shapes or types.

    >>> differing(np.float32([np.nan, 1e-42, 1.0, 0.0]), np.float32([np.nan, -0.0, 2.0, -0.0])).tolist()
    [False, False, True, True]
    """
    a, b = _pair("differing", got, want)
    if a.dtype != b.dtype:
        raise ValueError(f"[differing] expected type {b.dtype}, got {a.dtype}")
    unequal = np.asarray(_bits(a) != _bits(b))
    if a.dtype == np.float32:
        size_a, size_b = (np.asarray(_bits(array)).astype(np.uint32) & np.uint32(0x7FFFFFFF) for array in (a, b))
        smallest_normal = np.uint32(0x00800000)
        flushed = (size_a < smallest_normal) & (size_b < smallest_normal) & ((size_a > 0) | (size_b > 0))
        unequal = unequal & ~flushed
    return np.asarray(unequal)


def assert_bitwise_equal(got: npt.ArrayLike, want: npt.ArrayLike, name: str = "array") -> None:
    """Raise AssertionError with the count, the first coordinate and both values where `differing` finds a difference.

    >>> assert_bitwise_equal(np.int32([[1, 2], [3, 5]]), np.int32([[1, 2], [3, 4]]), "tiles")
    Traceback (most recent call last):
    AssertionError: [tiles] expected equal bits, got 1 of 4 different, first at (1, 1): got 5, expected 4
    """
    a, b = _pair(name, got, want)
    where = differing(a, b)
    count = int(np.count_nonzero(where))
    if count:
        first = tuple(int(axis[0]) for axis in np.nonzero(where)) if where.ndim else ()
        raise AssertionError(
            f"[{name}] expected equal bits, got {count} of {a.size} different, first at {first}: "
            f"got {_spelled(a[first])}, expected {_spelled(b[first])}"
        )


def _spelled(value: np.generic) -> str:
    if isinstance(value, np.floating):
        return f"{float(value)!r} (0x{value.tobytes()[::-1].hex()})"
    return str(value)


def half_ulp_distance(got: npt.ArrayLike, want: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Distance in units in the last place between halves: how many halves lie between them, plus one.

    got, want  any shape   float16
    return     same shape  int64    0 for NaN and NaN, and for +0 and -0; 65536 where only one is NaN

    Errors: ValueError for unequal shapes or another type.

    >>> half_ulp_distance(np.float16([1.0, 1.001, -0.0, np.nan]), np.float16([1.0, 1.0, 0.0, 1.0])).tolist()
    [0, 1, 0, 65536]
    """
    a, b = _pair("half_ulp_distance", got, want)
    if a.dtype != np.float16 or b.dtype != np.float16:
        raise ValueError(f"[half_ulp_distance] expected float16, got {a.dtype} and {b.dtype}")

    def place(values: Anything) -> npt.NDArray[np.int64]:
        bits = np.ascontiguousarray(values).view(np.uint16).astype(np.int64).reshape(values.shape)
        return np.where(bits & 0x8000, -(bits & 0x7FFF), bits)

    nan_a, nan_b = np.isnan(a.astype(np.float32)), np.isnan(b.astype(np.float32))
    distance = np.abs(place(a) - place(b))
    return np.asarray(np.where(nan_a | nan_b, np.where(nan_a & nan_b, 0, 65536), distance))


@dataclass(frozen=True)
class IdsComparison:
    """What `compare_ids` found.

    wrong   -  int    tokens whose ids differ where no near tie excuses it
    swaps   -  int    tokens whose ids differ only among near ties
    tokens  -  list   the wrong ones
    ok      -  bool   wrong == 0
    """

    wrong: int
    swaps: int
    tokens: list[int] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.wrong == 0


def compare_ids(got: npt.ArrayLike, want: npt.ArrayLike, logits: npt.ArrayLike, margin: float) -> IdsComparison:
    """Compare chosen experts, forgiving swaps among neighbours whose logits differ by at most margin of their size.

    Sort a token's logits from the largest down. Neighbours a >= b are near ties where a - b <= margin * max(|a|, |b|);
    runs of near ties are interchangeable. A slot may hold any expert of the run that the reference's choice is in.

    got, want  [T, K]  int    want: the reference's ids; -1 must match exactly
    logits     [T, E]  float  the reference's logits
    margin     -       float  1e-5 for equal inputs of the router; 8e-3 from the streams on, with fp16 operands

    Errors: ValueError for unequal shapes.

    >>> logits = [[3.0, 1.0, 1.0000001, 0.0]]
    >>> compare_ids([[0, 1]], [[0, 2]], logits, 1e-5)
    IdsComparison(wrong=0, swaps=1, tokens=[])
    >>> compare_ids([[0, 3]], [[0, 2]], logits, 1e-5).tokens
    [0]
    """
    a, b = (np.asarray(array, dtype=np.int64) for array in _pair("compare_ids", got, want))
    values = np.asarray(logits, dtype=np.float64)
    values = np.where(np.isnan(values), -np.inf, values)
    swaps, tokens = 0, []
    for token in np.flatnonzero(np.any(a != b, axis=1)).tolist():
        row = values[token]
        order = np.argsort(-row, kind="stable")
        upper, lower = row[order[:-1]], row[order[1:]]
        with np.errstate(invalid="ignore"):
            near = (upper - lower <= margin * np.maximum(np.abs(upper), np.abs(lower))) | (upper == lower)
        run = np.empty(len(row), dtype=np.int64)
        run[order] = np.concatenate([[0], np.cumsum(~near)])
        known = (a[token] >= 0) & (a[token] < len(row)) & (b[token] >= 0)
        same_run = np.zeros(known.shape, dtype=bool)
        same_run[known] = run[a[token][known]] == run[b[token][known]]
        repeats = len(np.unique(a[token][known])) < np.count_nonzero(known)
        if np.all((a[token] == b[token]) | same_run) and not repeats:
            swaps += 1
        else:
            tokens.append(int(token))
    return IdsComparison(len(tokens), swaps, tokens)
