"""Models: sizes and quantized tensors, from a GGUF file or from arrays in memory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from expertile import _core
from expertile.arrays import instance, listed, shown, text, whole
from expertile.layer_weights import TensorLike

COUNTS = ("dim", "n_experts", "top_k", "shared_ffn", "n_streams", "low_rank")
SIZES = ("n_layers", *COUNTS, "expert_ffn", "rms_eps")


class Model:
    """Sizes and tensors of a model's MoE half.

    config   sizes: n_layers, dim (D), n_experts (E), top_k (K), expert_ffn (F by layer), shared_ffn (Fs),
             n_streams (C), low_rank (R), rms_eps
    tensors  name -> tensor with .name .type .shape (ggml order, fastest first) .bytes .data (read-only uint8 view)
    """

    def __init__(self, core: _core.Model) -> None:
        instance(core, _core.Model, "what open_gguf or Model.from_tensors makes", "Model")
        self._core = core
        self.config = core.config
        self.tensors: dict[str, Any] = core.tensors

    @classmethod
    def from_tensors(cls, sizes: Mapping[str, Any], tensors: Mapping[str, TensorLike]) -> Model:
        """A model of arrays in memory.

        sizes    the fields of `config` by name; expert_ffn may be one number for all layers
        tensors  name (as in a GGUF file) -> object with .type, .shape, .data (uint8, C-contiguous; kept, not copied)

        Raises ValueError for sizes over a limit or data of the wrong length, TypeError for what is no mapping or no
        tensor, GGUFError for a tensor that is missing or has the wrong shape.
        """
        instance(sizes, Mapping, "sizes by name", "Model: sizes")
        instance(tensors, Mapping, "tensors by name", "Model: tensors")
        if set(sizes) != set(SIZES):
            raise ValueError(f"[Model: sizes] expected {', '.join(SIZES)}, got {', '.join(map(str, sizes)) or 'none'}")
        most = 2**31 - 1  # Config.validate() knows the limits; here no number may wrap
        fields: dict[str, Any] = {name: whole(sizes[name], 0, most, f"Model: {name}") for name in COUNTS}
        n_layers = whole(sizes["n_layers"], 1, max(len(tensors), 1), "Model: n_layers")  # a layer has tensors
        ffn = sizes["expert_ffn"]
        one = isinstance(ffn, str) or not isinstance(ffn, Iterable) or (isinstance(ffn, np.ndarray) and ffn.ndim == 0)
        by_layer = [ffn] * n_layers if one else list(ffn)
        fields["expert_ffn"] = [whole(size, 0, most, "Model: expert_ffn") for size in by_layer]
        fields |= {"n_layers": n_layers, "rms_eps": _number(sizes["rms_eps"], "Model: rms_eps")}
        config = _core.Config(**fields)
        core = [_tensor(text(name, "Model: tensors: name"), tensor) for name, tensor in tensors.items()]
        return cls(_core.Model(config, core))

    def __repr__(self) -> str:
        c = self.config
        return f"<Model: {c.n_layers} layers, D={c.dim}, E={c.n_experts}, K={c.top_k}>"


def _number(value: Any, where: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"[{where}] expected a number, got {shown(value)}") from None


def _tensor(name: str, tensor: Any) -> Any:
    """A tensor of the caller's for the engine. Raises TypeError, ValueError."""
    try:
        kind, shape, data = tensor.type, tensor.shape, tensor.data
    except AttributeError:
        raise TypeError(f"[{name}] expected .type, .shape and .data, got {type(tensor).__name__}") from None
    sizes = [whole(size, 0, 2**63 - 1, f"{name}: shape") for size in listed(shape, "a sequence of sizes", name)]
    return _core.Tensor(name, text(kind, f"{name}: type"), sizes, instance(data, np.ndarray, "a NumPy array", name))


def open_gguf(path: str | os.PathLike[str]) -> Model:
    """Opens the MoE half of a GGUF file of architecture qwen4exp (any shard of a split file will do).

    The file is mapped, not read; its sizes and types come from the file. Raises GGUFError naming the file and the
    field that is wrong, TypeError for what is no path, ValueError for one with a zero byte.
    """
    name = os.fsencode(instance(path, (str, bytes, os.PathLike), "a path", "open_gguf"))
    if b"\0" in name:  # to the system a name ends there
        raise ValueError(f"[open_gguf] expected a path without a zero byte, got {shown(path)}")
    return Model(_core.open_gguf(name))
