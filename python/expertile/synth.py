"""Synthetic models: random quant blocks in the shape of a real model, in memory or as a GGUF file.

The bytes of a quant block are random but for its fp16 scales, which are set so that weights have a mean near zero and
a standard deviation of about 1/sqrt(n_inner): activations keep the size that they have in a trained model.
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from expertile.quants import dequantize, tensor_bytes, type_info

Bytes = npt.NDArray[np.uint8]
Sizes = dict[str, Any]

# Sizes of whole models. expert_ffn is one number for every layer.
PRESETS: dict[str, Sizes] = {
    "flash-next": {
        "dim": 2560,
        "n_experts": 512,
        "top_k": 10,
        "expert_ffn": 640,
        "shared_ffn": 640,
        "n_streams": 4,
        "low_rank": 320,
        "rms_eps": 1e-6,
    },
    "tiny": {
        "dim": 512,
        "n_experts": 16,
        "top_k": 4,
        "expert_ffn": 64,
        "shared_ffn": 64,
        "n_streams": 4,
        "low_rank": 32,
        "rms_eps": 1e-6,
    },
}

# The second fp16 of a block (minimum or offset) as a multiple of its first: it brings the mean of random weights to 0.
_SECOND = {"Q5_1": -15.5, "Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}
# Types whose levels are lopsided and whose blocks have one scale: a scale of random sign brings the mean to 0.
_LOPSIDED = frozenset({"Q4_0", "Q5_0", "Q2_0", "IQ4_NL", "IQ4_XS"})
_CHUNK_BYTES = 1 << 20  # filled and patched while it is in the cache
_ROUTER_GAIN = 4.0  # a router that has made up its mind: logits of a standard deviation of about 2
_ALIGNMENT = 32


@dataclass(frozen=True)
class SynthTensor:
    """One tensor.

    type   -      str    ggml type, "IQ2_XS"
    shape  -      int    ggml order, fastest dimension first
    data   bytes  uint8  quant block after quant block
    """

    type: str
    shape: tuple[int, ...]
    data: Bytes


def synthetic_model(
    preset: str = "flash-next",
    layers: int = 1,
    gu: str = "IQ2_XS",
    dn: str = "IQ4_NL",
    seed: int = 0,
    *,
    types: Mapping[str, str] | None = None,
    fused: bool = False,
    vocab: int = 0,
    **sizes: Any,
) -> tuple[Sizes, dict[str, SynthTensor]]:
    """A model of random weights: sizes (the fields of `Config` by name) and tensors by name.

    preset   -  str  "flash-next" or "tiny"
    layers   -  int  how many layers
    gu, dn   -  str  types of the routed experts' gate and up, and of their down
    seed     -  int  a tensor depends on the seed and its own name only
    types    -  str  other types, by the end of the name without ".weight": {"ffn_up_exps": "Q4_K"}; the longest wins
    fused    -  bool gate and up in one tensor, `ffn_gate_up_exps`
    vocab    -  int  rows of `token_embd`, 0 = none
    sizes    -  -    replace those of the preset; expert_ffn may be one number, or one for each layer

    Errors: ValueError for an unknown preset, type or size, or a type whose quant block does not divide a row.

    >>> sizes, tensors = synthetic_model("tiny", layers=2)
    >>> sizes["n_layers"], tensors["blk.1.ffn_gate_exps.weight"].type, tensors["blk.1.ffn_down_exps.weight"].shape
    (2, 'IQ2_XS', (64, 512, 16))
    """
    config = _sizes(preset, layers, sizes)
    chosen = {"ffn_gate_exps": gu, "ffn_up_exps": gu, "ffn_gate_up_exps": gu, "ffn_down_exps": dn, **(types or {})}
    tensors: dict[str, SynthTensor] = {}
    if vocab:
        name, table = "token_embd.weight", (config["dim"], vocab)
        tensors[name] = _tensor(name, _type_of(name, table, chosen), table, seed, 1.0)
    for layer in range(layers):
        for part, shape in _layer_shapes(config, layer, fused).items():
            name = f"blk.{layer}.{part}.weight"
            gain = 1.0 if part != "ffn_gate_inp" else _ROUTER_GAIN
            tensors[name] = _tensor(name, _type_of(name, shape, chosen), shape, seed, gain / math.sqrt(shape[0]))
    return config, tensors


def random_tensor(name: str, type_name: str, shape: tuple[int, ...], seed: int = 0) -> SynthTensor:
    """One tensor of random weights, as a model of this seed holds under this name.

    >>> random_tensor("w", "Q8_0", (64, 3)).data.nbytes
    204
    """
    return _tensor(name, type_name, shape, seed, 1 / math.sqrt(shape[0]))


def random_streams(n_tokens: int, n_streams: int, dim: int, seed: int = 0) -> npt.NDArray[np.float32]:
    """Residual streams [T, C, D] fp32: normal, each stream of its own size. A token's values do not depend on T.

    >>> x = random_streams(3, 4, 64, seed=1)
    >>> x.shape, bool((x[:2] == random_streams(2, 4, 64, seed=1)).all())
    ((3, 4, 64), True)
    """
    rng = np.random.Generator(np.random.SFC64(seed))
    streams = rng.standard_normal((n_tokens, n_streams, dim), dtype=np.float32)
    streams *= np.linspace(0.75, 1.5, n_streams, dtype=np.float32)[:, None]
    return streams


def write_gguf(
    path: str | os.PathLike[str],
    sizes: Mapping[str, Any],
    tensors: Mapping[str, SynthTensor],
    *,
    split: int = 1,
    metadata: Mapping[str, Any] | None = None,
    architecture: str = "qwen4exp",
) -> list[Path]:
    """Writes a GGUF file, or `split` shards of one, and returns their paths.

    sizes         the fields of `Config` by name
    tensors       written in their order, one after the other, without a copy
    split         above 1: NAME-00001-of-0000N.gguf beside `path`, only the first of which holds the model's keys
    metadata      more keys, or other values: str, bool, int (uint32, else uint64 or int64), float (float32), or a list

    A file appears under its name once it is whole. Errors: OSError; ValueError for metadata of another type, or fewer
    tensors than shards. Source of the layout: ggml's documentation of GGUF, version 3.
    """
    target = Path(path)
    if not 1 <= split <= max(len(tensors), 1):
        raise ValueError(f"[write_gguf] expected 1 to {len(tensors)} shards, got {split}")
    keys = {"general.architecture": architecture, **_model_keys(sizes, architecture), **(metadata or {})}
    if split == 1:
        _write_file(target, keys, tensors)
        return [target]
    names = list(tensors)
    stem = target.name.removesuffix(".gguf")
    paths = [target.with_name(f"{stem}-{i + 1:05d}-of-{split:05d}.gguf") for i in range(split)]
    for i, shard in enumerate(paths):
        part = {name: tensors[name] for name in names[i * len(names) // split : (i + 1) * len(names) // split]}
        place = {"split.no": i, "split.count": split, "split.tensors.count": len(tensors)}
        _write_file(shard, {**(keys if i == 0 else {}), **place}, part)
    return paths


def _sizes(preset: str, layers: int, changes: Mapping[str, Any]) -> Sizes:
    if preset not in PRESETS:
        raise ValueError(f"[synthetic_model] expected a preset of {', '.join(PRESETS)}, got {preset!r}")
    for name in changes:
        if name not in PRESETS[preset]:
            raise ValueError(f"[synthetic_model] expected a size of {', '.join(PRESETS[preset])}, got {name!r}")
    if layers < 1:
        raise ValueError(f"[synthetic_model] expected at least 1 layer, got {layers}")
    config: Sizes = {"n_layers": layers, **PRESETS[preset], **changes}
    ffn = config["expert_ffn"]
    config["expert_ffn"] = [ffn] * layers if isinstance(ffn, int) else list(ffn)
    if len(config["expert_ffn"]) != layers:
        raise ValueError(f"[synthetic_model: expert_ffn] expected {layers} sizes, got {len(config['expert_ffn'])}")
    return config


def _layer_shapes(config: Sizes, layer: int, fused: bool) -> dict[str, tuple[int, ...]]:
    dim, experts, shared = config["dim"], config["n_experts"], config["shared_ffn"]
    ffn, streams, rank = config["expert_ffn"][layer], config["n_streams"], config["low_rank"]
    wide = dim * streams
    gate_up = {"ffn_gate_up_exps": (dim, 2 * ffn, experts)}
    if not fused:
        gate_up = {"ffn_gate_exps": (dim, ffn, experts), "ffn_up_exps": (dim, ffn, experts)}
    return {
        "hc_ffn_norm": (wide,),
        "hc_ffn_down": (wide, rank),
        "hc_ffn_up": (rank, wide),
        "hc_ffn_inject": (wide, streams),
        "ffn_gate_inp": (dim, experts),
        **gate_up,
        "ffn_down_exps": (ffn, dim, experts),
        "ffn_gate_inp_shexp": (dim,),
        "ffn_gate_shexp": (dim, shared),
        "ffn_up_shexp": (dim, shared),
        "ffn_down_shexp": (shared, dim),
    }


def _type_of(name: str, shape: Sequence[int], chosen: Mapping[str, str]) -> str:
    """The chosen type where a name ends in one of `chosen`; else F32 for what decides, Q8_0 (or F16) for the rest."""
    stem = name.removesuffix(".weight")
    ends = [end for end in chosen if stem == end or stem.endswith("." + end)]
    if ends:
        return chosen[max(ends, key=len)]
    if stem.endswith(("hc_ffn_norm", "hc_ffn_inject", "ffn_gate_inp", "ffn_gate_inp_shexp")):
        return "F32"
    return "Q8_0" if shape[0] % type_info("Q8_0").elements == 0 else "F16"


def _tensor(name: str, type_name: str, shape: tuple[int, ...], seed: int, std: float) -> SynthTensor:
    rng = np.random.Generator(np.random.SFC64([seed, zlib.crc32(name.encode())]))
    data = np.empty(tensor_bytes(type_name, shape), np.uint8)
    if name.endswith("norm.weight"):
        values = data.view(np.float32)
        rng.standard_normal(dtype=np.float32, out=values)
        values *= np.float32(0.1)
        values += np.float32(1.0)
    elif type_info(type_name).half_offsets:
        _fill_blocks(data, type_name, std / _unit_std(type_name), rng)
    else:
        _fill_floats(data, type_name, std, rng)
    return SynthTensor(type_name, shape, data)


def _fill_floats(data: Bytes, type_name: str, std: float, rng: np.random.Generator) -> None:
    width = type_info(type_name).bytes
    for start in range(0, len(data), _CHUNK_BYTES):
        part = data[start : start + _CHUNK_BYTES]
        values = rng.standard_normal(len(part) // width, dtype=np.float32)
        values *= np.float32(std)
        if type_name == "BF16":  # the upper half of fp32: rounded towards zero
            part[:] = (values.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
        else:
            part[:] = values.astype("<f2" if type_name == "F16" else "<f4").view(np.uint8)


def _fill_blocks(data: Bytes, type_name: str, scale: float, rng: np.random.Generator) -> None:
    """Random bytes in place, then the fp16 fields of every block: the random byte that lies there picks a scale."""
    info = type_info(type_name)
    first = scale * np.linspace(0.5, 1.5, 256)
    if type_name in _LOPSIDED:
        first[::2] *= -1
    tables = [(info.half_offsets[0], first)]
    if len(info.half_offsets) > 1:
        tables.append((info.half_offsets[1], first * _SECOND[type_name]))
    fields = [(offset, values.astype("<f2").view("<u2")) for offset, values in tables]
    chunk = _CHUNK_BYTES // (8 * info.bytes) * (8 * info.bytes)  # whole blocks and whole words
    for start in range(0, len(data), chunk):
        part = data[start : start + chunk]
        words = rng.bit_generator.random_raw(-(-len(part) // 8))
        part[:] = words.view(np.uint8)[: len(part)]
        blocks = part.reshape(-1, info.bytes)
        picks = blocks[:, info.half_offsets[0]].copy()
        for offset, table in fields:
            blocks[:, offset : offset + 2].view("<u2")[:, 0] = table[picks]


@cache
def _unit_std(type_name: str) -> float:
    """The standard deviation of the random weights of a type whose scales are around 1."""
    n_weights = 256 * 512
    data = np.empty(tensor_bytes(type_name, (n_weights,)), np.uint8)
    _fill_blocks(data, type_name, 1.0, np.random.Generator(np.random.SFC64(0)))
    return float(np.sqrt(np.mean(np.square(dequantize(data, type_name, (n_weights,)), dtype=np.float64))))


def _model_keys(sizes: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    ffn = sizes["expert_ffn"]
    if not isinstance(ffn, int):
        ffn = ffn[0] if len(set(ffn)) == 1 else list(ffn)
    keys = {
        "block_count": sizes["n_layers"],
        "embedding_length": sizes["dim"],
        "expert_count": sizes["n_experts"],
        "expert_used_count": sizes["top_k"],
        "expert_feed_forward_length": ffn,
        "expert_shared_feed_forward_length": sizes["shared_ffn"],
        "attention.layer_norm_rms_epsilon": float(sizes["rms_eps"]),
        "hyper_connection.count": sizes["n_streams"],
        "hyper_connection.low_rank": sizes["low_rank"],
    }
    return {f"{architecture}.{key}": value for key, value in keys.items()}


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> tuple[int, bytes]:
    """The type number of a metadata value, and its bytes."""
    if isinstance(value, bool):
        return 7, struct.pack("<B", value)
    if isinstance(value, int):
        if 0 <= value < 1 << 32:
            return 4, struct.pack("<I", value)
        return (11, struct.pack("<q", value)) if value < 0 else (10, struct.pack("<Q", value))
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, str):
        return 8, _string(value)
    if isinstance(value, list) and value:
        parts = [_value(item) for item in value]
        numbers = {number for number, _ in parts}
        if len(numbers) == 1 and 9 not in numbers:
            return 9, struct.pack("<IQ", numbers.pop(), len(value)) + b"".join(raw for _, raw in parts)
    raise ValueError(f"[write_gguf: metadata] expected str, bool, int, float or a list of one of them, got {value!r}")


def _padding(size: int) -> int:
    return -size % _ALIGNMENT


def _header(keys: Mapping[str, Any], tensors: Mapping[str, SynthTensor]) -> bytes:
    parts = [struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(keys))]
    for key, value in keys.items():
        number, raw = _value(value)
        parts += [_string(key), struct.pack("<I", number), raw]
    offset = 0
    for name, tensor in tensors.items():
        dims = tensor.shape
        parts += [_string(name), struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_info(tensor.type).id, offset)]
        offset += tensor.data.nbytes + _padding(tensor.data.nbytes)
    header = b"".join(parts)
    return header + bytes(_padding(len(header)))


@contextlib.contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """Where to write a file that takes its name when it is complete, and leaves nothing behind when it is not.

    A link stays a link: what it points to is replaced. A device or a pipe is a ValueError: it would become a file.
    """
    target = path.resolve()
    if target.exists() and not target.is_file():
        raise ValueError(f"[write] expected a regular file or a new name, got {path}")
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        yield unfinished
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def _write_file(path: Path, keys: Mapping[str, Any], tensors: Mapping[str, SynthTensor]) -> None:
    with replaced_file(path) as unfinished, unfinished.open("wb") as file:
        file.write(_header(keys, tensors))
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor.data).data)
            file.write(bytes(_padding(tensor.data.nbytes)))
