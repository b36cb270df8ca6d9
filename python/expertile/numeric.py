"""The arithmetic of the reference: activation functions, the rounding to half, and a GEMM, in numpy float64.

A GEMM takes `operands`:

"exact"  weights decoded to fp32, everything else float64
"fp16"   what fp16-operand kernels compute, but with exact sums: weights and activations are rounded to half. An
         activation is first rounded to fp32, then to half, and saturates at +-65504 (`to_half`).

The kernels' counterpart is metal/include/numeric.h.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from expertile.layer_weights import Array

Operands = Literal["exact", "fp16"]

HALF_MAX = 65504.0


def sigmoid(v: npt.ArrayLike) -> Array:
    """1 / (1 + exp(-v)), float64."""
    with np.errstate(over="ignore"):
        return np.asarray(1.0 / (1.0 + np.exp(-np.asarray(v, dtype=np.float64))))


def silu(v: npt.ArrayLike) -> Array:
    """v * sigmoid(v), float64."""
    with np.errstate(invalid="ignore"):
        return np.asarray(np.asarray(v, dtype=np.float64) * sigmoid(v))


def to_half(values: npt.ArrayLike) -> tuple[npt.NDArray[np.float16], int]:
    """Round activations to half as the kernels do: to fp32, clamped to +-65504, to nearest even. NaN passes.

    return  same shape  float16
    return  -           int      how many exceeded +-65504

    >>> to_half([1.0, 1e5, -np.inf, 65503.0])
    (array([ 1.00e+00,  6.55e+04, -6.55e+04,  6.55e+04], dtype=float16), 2)
    """
    with np.errstate(over="ignore"):
        fp32 = np.asarray(values).astype(np.float32)
    exceeds = np.abs(fp32) > HALF_MAX
    return np.clip(fp32, -HALF_MAX, HALF_MAX).astype(np.float16), int(np.count_nonzero(exceeds))


def product(x: npt.ArrayLike, weight: Array, operands: Operands, scale: float = 1.0) -> Array:
    """A GEMM: y[t, n] = scale * sum_k weight[n, k] * x[t, k], sums in float64; "fp16" rounds both operands first.

    x       [T, n_inner]       float
    weight  [n_cols, n_inner]  float64
    return  [T, n_cols]        float64

    >>> product([[1.0, 2049.0]], np.array([[1.0, 1.0]]), "fp16").tolist()
    [[2049.0]]
    """
    if operands not in ("exact", "fp16"):
        raise ValueError(f"[product] expected operands 'exact' or 'fp16', got {operands!r}")
    activations = np.asarray(x, dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        if operands == "fp16":
            activations = to_half(activations)[0].astype(np.float64)
            weight = weight.astype(np.float16).astype(np.float64)
        return np.asarray(scale * (activations @ weight.T))
