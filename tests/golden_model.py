"""A reader of GGUF files for the tests, independent of the engine's: no checks, type 42 included."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from expertile.layer_weights import LayerWeights, WeightArray
from expertile.quants import TYPES, tensor_bytes

TYPE_NAMES = {info.id: name for name, info in TYPES.items()}
SCALAR_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


@dataclass(frozen=True)
class GoldenModel:
    """A file's keys and those of its tensors whose types the engine knows."""

    keys: dict[str, Any]
    tensors: dict[str, WeightArray]

    def layer(self, index: int) -> LayerWeights:
        eps = float(self.keys["qwen4exp.attention.layer_norm_rms_epsilon"])
        return LayerWeights(self.tensors, index, int(self.keys["qwen4exp.expert_used_count"]), eps)


class _Cursor:
    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.at = 0

    def scalar(self, format_: str) -> Any:
        (value,) = struct.unpack_from("<" + format_, self.raw, self.at)
        self.at += struct.calcsize("<" + format_)
        return value

    def text(self) -> str:
        length = self.scalar("Q")
        self.at += length
        return self.raw[self.at - length : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            item, count = self.scalar("I"), self.scalar("Q")
            return [self.value(item) for _ in range(count)]
        return self.scalar(SCALAR_FORMATS[kind])


def read_golden(path: Path) -> GoldenModel:
    cursor = _Cursor(path.read_bytes())
    assert cursor.raw[:4] == b"GGUF"
    cursor.at = 8
    n_tensors, n_keys = cursor.scalar("Q"), cursor.scalar("Q")
    keys = {}
    for _ in range(n_keys):
        name = cursor.text()
        keys[name] = cursor.value(cursor.scalar("I"))
    entries = []
    for _ in range(n_tensors):
        name = cursor.text()
        shape = tuple(cursor.scalar("Q") for _ in range(cursor.scalar("I")))
        entries.append((name, shape, cursor.scalar("I"), cursor.scalar("Q")))
    align = int(keys.get("general.alignment", 32))
    start = -(-cursor.at // align) * align
    raw = np.frombuffer(cursor.raw, dtype=np.uint8)
    tensors = {}
    for name, shape, kind, offset in entries:
        if kind in TYPE_NAMES:
            size = tensor_bytes(TYPE_NAMES[kind], shape)
            tensors[name] = WeightArray(TYPE_NAMES[kind], shape, raw[start + offset : start + offset + size])
    return GoldenModel(keys, tensors)
