"""A second, plain reader of GGUF headers for the tests: where every count, length, dimension and offset lies.

It trusts the file, which is what the reader under test must not do.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WIDTH = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


@dataclass(frozen=True)
class Field:
    name: str  # "tensor_count", "<key> value", "<tensor> dimension 1" ...
    at: int
    width: int
    value: int


class Fields:
    """All fields of a header, the byte where it ends and the byte where the data begins."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.at = 4
        self.fields: list[Field] = []
        self.alignment = 32
        self.number("version", 4)
        n_tensors, n_keys = self.number("tensor_count", 8), self.number("metadata_kv_count", 8)
        for i in range(n_keys):
            self.key_value(i)
        for i in range(n_tensors):
            self.tensor(i)
        self.end = self.at
        self.data_start = -(-self.at // self.alignment) * self.alignment

    def number(self, name: str, width: int) -> int:
        value = int.from_bytes(self.raw[self.at : self.at + width], "little")
        self.fields.append(Field(name, self.at, width, value))
        self.at += width
        return value

    def text(self, name: str) -> str:
        length = self.number(name, 8)
        self.at += length
        return self.raw[self.at - length : self.at].decode()

    def key_value(self, i: int) -> None:
        key = self.text(f"key {i} length")
        kind = self.number(f"{key} type", 4)
        if kind == 8:
            self.text(f"{key} value length")
        elif kind == 9:
            element = self.number(f"{key} element type", 4)
            for j in range(self.number(f"{key} array length", 8)):
                if element == 8:
                    self.text(f"{key} element {j} length")
                else:
                    self.at += WIDTH[element]
        else:
            value = self.number(f"{key} value", WIDTH[kind])
            if key == "general.alignment":
                self.alignment = value

    def tensor(self, i: int) -> None:
        name = self.text(f"tensor {i} name length")
        for d in range(self.number(f"{name} n_dims", 4)):
            self.number(f"{name} dimension {d}", 8)
        self.number(f"{name} type", 4)
        self.number(f"{name} offset", 8)

    def __getitem__(self, name: str) -> Field:
        return next(field for field in self.fields if field.name == name)


def fields_of(path: Path) -> Fields:
    return Fields(path.read_bytes())


def patch(path: Path, changes: dict[str, int]) -> Path:
    """Sets fields of a file by name, in place."""
    raw = bytearray(path.read_bytes())
    fields = Fields(bytes(raw))
    for name, value in changes.items():
        field = fields[name]
        raw[field.at : field.at + field.width] = value.to_bytes(field.width, "little")
    path.write_bytes(raw)
    return path


def text(value: str) -> bytes:
    raw = value.encode("latin-1")
    return struct.pack("<Q", len(raw)) + raw


def key(name: str, kind: int, layout: str, *values: Any) -> bytes:
    return text(name) + struct.pack("<I", kind) + struct.pack("<" + layout, *values)


def tensor(name: str, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def build(path: Path, keys: list[bytes], tensors: list[bytes], data: bytes = b"", alignment: int = 32) -> Path:
    """A file of hand-made parts, however wrong."""
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(keys)) + b"".join(keys + tensors)
    path.write_bytes(head + bytes(-len(head) % alignment if data else 0) + data)
    return path
