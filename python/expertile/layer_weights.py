"""The weights of a layer's MoE half as the numpy reference sees them: found by name, decoded on demand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from expertile.quants import dequantize, tensor_bytes

Array = npt.NDArray[np.float64]


class TensorLike(Protocol):
    """A weight tensor.

    type   its type's name, "IQ2_XS"
    shape  in ggml order, fastest dimension first
    data   its bytes, uint8
    """

    @property
    def type(self) -> str: ...
    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def data(self) -> Any: ...


class WeightArray(NamedTuple):
    """A tensor held in memory: type name, shape in ggml order, uint8 bytes."""

    type: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]

    @classmethod
    def from_values(cls, values: npt.ArrayLike) -> WeightArray:
        """An F32 tensor of an array [.., rows, inner].

        >>> WeightArray.from_values([[1.0, 2.0, 3.0]]).shape
        (3, 1)
        """
        array = np.ascontiguousarray(values, dtype="<f4")
        return cls("F32", tuple(reversed(array.shape)), array.reshape(-1).view(np.uint8))


@dataclass(frozen=True)
class LayerWeights:
    """The weights of one layer's MoE half, decoded on demand.

    tensors    -  name -> tensor  the model's tensors (`TensorLike`), named as in a GGUF file
    layer      -  int
    top_k      -  int             experts a token
    eps        -  float           of the RMS norm
    dim        -  int             D, told from the tensors, like
    n_experts  -  int             E and
    n_streams  -  int             C

    Errors: ValueError naming a tensor that is missing or whose bytes do not fit its shape.

    >>> w = example_weights()
    >>> w.n_streams, w.dim, w.n_experts, w.expert("down", 2).shape
    (2, 8, 4, (8, 6))
    """

    tensors: Mapping[str, TensorLike]
    layer: int
    top_k: int
    eps: float = 1e-6

    @classmethod
    def from_model(cls, model: Any, layer: int) -> LayerWeights:
        """Of a model with ``.tensors`` (name -> tensor) and ``.config`` (``top_k``, ``rms_eps``)."""
        return cls(model.tensors, layer, int(model.config.top_k), float(model.config.rms_eps))

    def find(self, part: str, kind: str = "weight") -> TensorLike | None:
        """The tensor `blk.<layer>.<part>.<kind>`; None where the model has none."""
        return self.tensors.get(f"blk.{self.layer}.{part}.{kind}")

    def tensor(self, part: str) -> TensorLike:
        """The tensor `blk.<layer>.<part>.weight`."""
        found = self.find(part)
        if found is None:
            raise ValueError(f"[LayerWeights] expected a tensor blk.{self.layer}.{part}.weight, got none")
        return found

    @property
    def dim(self) -> int:
        return int(self.tensor("ffn_gate_inp").shape[0])

    @property
    def n_experts(self) -> int:
        return int(self.tensor("ffn_gate_inp").shape[1])

    @property
    def n_streams(self) -> int:
        return int(self.tensor("hc_ffn_norm").shape[0]) // self.dim

    def matrix(self, part: str) -> Array:
        """A whole tensor, [rows, inner] float64 (exact fp32 values); one dimension gives one row."""
        tensor = self.tensor(part)
        return dequantize(tensor.data, tensor.type, tensor.shape).astype(np.float64).reshape(-1, int(tensor.shape[0]))

    def expert(self, part: Literal["gate", "up", "down"], expert: int) -> Array:
        """One expert's matrix, [rows, inner] float64. A fused gate_up tensor holds gate's rows, then up's."""
        fused = self.find("ffn_gate_up_exps") if part != "down" else None
        tensor = fused if fused is not None else self.tensor(f"ffn_{part}_exps")
        inner, rows, n_experts = (int(size) for size in tensor.shape)
        if not 0 <= expert < n_experts:
            raise ValueError(f"[LayerWeights.expert] expected an expert in 0..{n_experts - 1}, got {expert}")
        first, count = expert * rows, rows
        if fused is not None:
            count = rows // 2
            first += count if part == "up" else 0
        row_bytes = tensor_bytes(tensor.type, (inner,))
        raw = np.asarray(tensor.data).reshape(-1)[first * row_bytes : (first + count) * row_bytes]
        return dequantize(raw, tensor.type, (inner, count)).astype(np.float64)

    def scale(self, part: str, expert: int = 0) -> float:
        """The factor of a product, from the optional tensor ``blk.N.<part>.scale``; 1 where there is none."""
        found = self.find(part, "scale")
        return 1.0 if found is None else float(dequantize(found.data, found.type, found.shape).reshape(-1)[expert])


def example_weights(seed: int = 0) -> LayerWeights:
    """A layer of F32 weights, small enough for the examples: C = 2, D = 8, R = 4, E = 4, K = 2, F = Fs = 6."""
    rng = np.random.default_rng(seed)
    shapes = {
        "hc_ffn_norm": (16,), "hc_ffn_down": (4, 16), "hc_ffn_up": (16, 4), "hc_ffn_inject": (2, 16),
        "ffn_gate_inp": (4, 8), "ffn_gate_exps": (4, 6, 8), "ffn_up_exps": (4, 6, 8), "ffn_down_exps": (4, 8, 6),
        "ffn_gate_inp_shexp": (8,), "ffn_gate_shexp": (6, 8), "ffn_up_shexp": (6, 8), "ffn_down_shexp": (8, 6),
    }  # fmt: skip
    tensors: dict[str, TensorLike] = {
        f"blk.0.{part}.weight": WeightArray.from_values(rng.standard_normal(shape)) for part, shape in shapes.items()
    }
    return LayerWeights(tensors, 0, top_k=2)
