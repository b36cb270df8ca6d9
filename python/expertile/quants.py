"""Quantized weight types: sizes and numpy decoders.

Every decoder turns the bytes of quant blocks into fp32 values, with the arithmetic in the order that the GPU kernels
use (``metal/include/quant.h``), so that the two agree bit for bit. fp16 scales become fp32 exactly, integers are exact
in fp32; what is left is one, two or three roundings a weight, in the order written in each decoder.

Field layouts: llama.cpp, ``ggml/src/ggml-common.h``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from expertile.quant_grids import even_parity_signs, grid

Bytes = npt.NDArray[np.uint8]
Values = npt.NDArray[np.float32]

# Blocks decoded at a time, in weights: bounds the scratch memory to a few tens of megabytes.
CHUNK_WEIGHTS = 1 << 19

# The 16 levels of the non-linear 4-bit types.
LEVELS_4BIT = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)


def _half(blocks: Bytes, at: int) -> Values:
    """The fp16 number at a byte offset of every block, as fp32 [n, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _words(packed: Bytes, dtype: str) -> npt.NDArray[np.uint32]:
    """Little-endian words of every block, widened to 32 bits."""
    return np.ascontiguousarray(packed).view(dtype).astype(np.uint32)


def _fields(packed: Bytes, width: int, group: int) -> Bytes:
    """Fields of `width` bits. Of every `group` bytes: the lowest field of each byte, then the next field, and so on."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    split = packed.reshape(len(packed), -1, 1, group) >> shifts
    return np.asarray(split & np.uint8((1 << width) - 1)).reshape(len(packed), -1)


def _scaled(scale: Values, values: Values) -> Values:
    """values [n, elements] times scale [n, scales]: each scale serves elements / scales neighbours."""
    n_blocks, n_scales = scale.shape
    return np.asarray(scale[:, :, None] * values.reshape(n_blocks, n_scales, -1)).reshape(n_blocks, -1)


def _less(values: Values, minimum: Values) -> Values:
    """values [n, elements] minus minimum [n, minimums]."""
    n_blocks, n_minimums = minimum.shape
    return np.asarray(values.reshape(n_blocks, n_minimums, -1) - minimum[:, :, None]).reshape(n_blocks, -1)


def _f32(packed: npt.NDArray[np.generic]) -> Values:
    return packed.astype(np.float32)


def _decode_f32(b: Bytes) -> Values:
    return np.ascontiguousarray(b).view("<f4").astype(np.float32)


def _decode_f16(b: Bytes) -> Values:
    return _half(b, 0)


def _decode_bf16(b: Bytes) -> Values:
    return (_words(b, "<u2") << np.uint32(16)).view(np.float32)


def _decode_q4_0(b: Bytes) -> Values:
    return _half(b, 0) * (_f32(_fields(b[:, 2:18], 4, 16)) - np.float32(8))


def _q5(low: Bytes, high: Bytes) -> Values:
    return _f32(_fields(low, 4, 16) | (_fields(high, 1, 1) << np.uint8(4)))


def _decode_q5_0(b: Bytes) -> Values:
    return _half(b, 0) * (_q5(b[:, 6:22], b[:, 2:6]) - np.float32(16))


def _decode_q5_1(b: Bytes) -> Values:
    return _half(b, 0) * _q5(b[:, 8:24], b[:, 4:8]) + _half(b, 2)


def _decode_q8_0(b: Bytes) -> Values:
    return _half(b, 0) * _f32(b[:, 2:34].view(np.int8))


def _decode_q2_0(b: Bytes) -> Values:
    return (_f32(_fields(b[:, 2:18], 2, 1)) - np.float32(1)) * _half(b, 0)


def _decode_q2_k(b: Bytes) -> Values:
    scale = _half(b, 80) * _f32(b[:, :16] & np.uint8(15))
    minimum = _half(b, 82) * _f32(b[:, :16] >> np.uint8(4))
    return _less(_scaled(scale, _f32(_fields(b[:, 16:80], 2, 32))), minimum)


def _decode_q3_k(b: Bytes) -> Values:
    low, high = _fields(b[:, 96:104], 4, 8), _fields(b[:, 104:108], 2, 4)
    scale = _half(b, 108) * (_f32(low | (high << np.uint8(4))) - np.float32(32))
    # The weight is 4 lower where its bit in hmask is clear.
    q = _f32(_fields(b[:, 32:96], 2, 32)) - np.float32(4) * _f32(_fields(b[:, :32], 1, 32) ^ np.uint8(1))
    return _scaled(scale, q)


def _six_bit_pairs(packed: Bytes) -> tuple[Values, Values]:
    """The 8 scales and 8 minimums, 6 bits each, that Q4_K and Q5_K pack in 12 bytes."""
    a, b, c = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    six, two, four = np.uint8(63), np.uint8(6), np.uint8(4)
    scale = np.concatenate([a & six, (c & np.uint8(15)) | ((a >> two) << four)], axis=1)
    minimum = np.concatenate([b & six, (c >> four) | ((b >> two) << four)], axis=1)
    return _f32(scale), _f32(minimum)


def _decode_q4_k(b: Bytes) -> Values:
    scale, minimum = _six_bit_pairs(b[:, 4:16])
    return _less(_scaled(_half(b, 0) * scale, _f32(_fields(b[:, 16:144], 4, 32))), _half(b, 2) * minimum)


def _decode_q5_k(b: Bytes) -> Values:
    scale, minimum = _six_bit_pairs(b[:, 4:16])
    q = _fields(b[:, 48:176], 4, 32) | (_fields(b[:, 16:48], 1, 32) << np.uint8(4))
    return _less(_scaled(_half(b, 0) * scale, _f32(q)), _half(b, 2) * minimum)


def _decode_q6_k(b: Bytes) -> Values:
    q = _fields(b[:, :128], 4, 64) | (_fields(b[:, 128:192], 2, 32) << np.uint8(4))
    scale = _half(b, 208) * _f32(b[:, 192:208].view(np.int8))
    return _scaled(scale, _f32(q) - np.float32(32))


def _decode_iq4_nl(b: Bytes) -> Values:
    return _half(b, 0) * LEVELS_4BIT[_fields(b[:, 2:18], 4, 16)]


def _decode_iq4_xs(b: Bytes) -> Values:
    six = _fields(b[:, 4:8], 4, 1) | (_fields(b[:, 2:4], 2, 1) << np.uint8(4))
    return _scaled(_half(b, 0) * (_f32(six) - np.float32(32)), LEVELS_4BIT[_fields(b[:, 8:136], 4, 16)])


def _signed(scale: Values, values: Values, sign_bits: Bytes) -> Values:
    """(scale * value) * sign, sign -1 where the weight's bit is set. sign_bits: [n, elements / 8], lowest bit first."""
    sign = np.float32(1) - np.float32(2) * _f32(_fields(sign_bits, 1, 1))
    return _scaled(scale, values.reshape(len(values), -1)) * sign


def _quarter(d: Values, scale: npt.NDArray[np.generic], factor: float) -> Values:
    return d * (np.float32(0.5) + _f32(scale)) * np.float32(factor)


def _seven_bit_signs(words: npt.NDArray[np.uint32]) -> Bytes:
    """Four 7-bit sign indices in the low 28 bits of every word: sign masks [n, 4 * words]."""
    index = (words[:, :, None] >> np.array([0, 7, 14, 21], dtype=np.uint32)) & np.uint32(127)
    return np.asarray(even_parity_signs()[index]).reshape(len(words), -1)


def _decode_iq2_xxs(b: Bytes) -> Values:
    groups = b[:, 2:66].reshape(len(b), 8, 8)
    words = _words(groups[:, :, 4:].reshape(len(b), 32), "<u4")
    values = grid("IQ2_XXS")[groups[:, :, :4]]
    return _signed(_quarter(_half(b, 0), words >> np.uint32(28), 0.25), values, _seven_bit_signs(words))


def _decode_iq2_xs(b: Bytes) -> Values:
    words = _words(b[:, 2:66], "<u2")
    scale = _quarter(_half(b, 0), _fields(b[:, 66:74], 4, 1), 0.25)
    return _signed(scale, grid("IQ2_XS")[words & np.uint32(511)], even_parity_signs()[words >> np.uint32(9)])


def _decode_iq2_s(b: Bytes) -> Values:
    index = b[:, 2:34].astype(np.uint16) | (_fields(b[:, 66:74], 2, 1).astype(np.uint16) << np.uint16(8))
    return _signed(_quarter(_half(b, 0), _fields(b[:, 74:82], 4, 1), 0.25), grid("IQ2_S")[index], b[:, 34:66])


def _decode_iq3_xxs(b: Bytes) -> Values:
    words = _words(b[:, 66:98], "<u4")
    scale = _quarter(_half(b, 0), words >> np.uint32(28), 0.5)
    return _signed(scale, grid("IQ3_XXS")[b[:, 2:66]], _seven_bit_signs(words))


def _decode_iq3_s(b: Bytes) -> Values:
    index = b[:, 2:66].astype(np.uint16) | (_fields(b[:, 66:74], 1, 1).astype(np.uint16) << np.uint16(8))
    scale = _half(b, 0) * (np.float32(1) + np.float32(2) * _f32(_fields(b[:, 106:110], 4, 1)))
    return _signed(scale, grid("IQ3_S")[index], b[:, 74:106])


@dataclass(frozen=True)
class TypeInfo:
    """One quantized type.

    name          -  str    as GGUF spells it, "IQ2_XS"
    id            -  int    ggml's number
    elements      -  int    weights in a quant block
    bytes         -  int    bytes of a quant block
    half_offsets  -  tuple  byte offsets of a block's fp16 numbers (its scale first, then its minimum)
    decode        -  -      uint8 [n, bytes] -> float32 [n, elements]
    """

    name: str
    id: int
    elements: int
    bytes: int
    half_offsets: tuple[int, ...]
    decode: Callable[[Bytes], Values]


TYPES: dict[str, TypeInfo] = {
    info.name: info
    for info in (
        TypeInfo("F32", 0, 1, 4, (), _decode_f32),
        TypeInfo("F16", 1, 1, 2, (), _decode_f16),
        TypeInfo("Q4_0", 2, 32, 18, (0,), _decode_q4_0),
        TypeInfo("Q5_0", 6, 32, 22, (0,), _decode_q5_0),
        TypeInfo("Q5_1", 7, 32, 24, (0, 2), _decode_q5_1),
        TypeInfo("Q8_0", 8, 32, 34, (0,), _decode_q8_0),
        TypeInfo("Q2_K", 10, 256, 84, (80, 82), _decode_q2_k),
        TypeInfo("Q3_K", 11, 256, 110, (108,), _decode_q3_k),
        TypeInfo("Q4_K", 12, 256, 144, (0, 2), _decode_q4_k),
        TypeInfo("Q5_K", 13, 256, 176, (0, 2), _decode_q5_k),
        TypeInfo("Q6_K", 14, 256, 210, (208,), _decode_q6_k),
        TypeInfo("IQ2_XXS", 16, 256, 66, (0,), _decode_iq2_xxs),
        TypeInfo("IQ2_XS", 17, 256, 74, (0,), _decode_iq2_xs),
        TypeInfo("IQ3_XXS", 18, 256, 98, (0,), _decode_iq3_xxs),
        TypeInfo("IQ4_NL", 20, 32, 18, (0,), _decode_iq4_nl),
        TypeInfo("IQ3_S", 21, 256, 110, (0,), _decode_iq3_s),
        TypeInfo("IQ2_S", 22, 256, 82, (0,), _decode_iq2_s),
        TypeInfo("IQ4_XS", 23, 256, 136, (0,), _decode_iq4_xs),
        TypeInfo("BF16", 30, 1, 2, (), _decode_bf16),
        TypeInfo("Q2_0", 42, 64, 18, (0,), _decode_q2_0),
    )
}


def type_info(name: str) -> TypeInfo:
    """The type of a name.

    Errors: ValueError naming the known types.

    >>> type_info("IQ4_NL").bytes
    18
    """
    if name not in TYPES:
        raise ValueError(f"[type_info] expected one of {', '.join(TYPES)}, got {name!r}")
    return TYPES[name]


def tensor_bytes(type_name: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor: product(shape) / elements * bytes.

    type_name  -  str  "IQ2_XS"
    shape      -  int  ggml order, fastest dimension first
    return     -  int  bytes

    Errors: ValueError where the first dimension is no multiple of the quant block, or a dimension is below 1.

    >>> tensor_bytes("IQ2_XS", (2560, 640, 2))
    947200
    """
    info = type_info(type_name)
    if not shape or min(shape) < 1:
        raise ValueError(f"[tensor_bytes] expected dimensions of at least 1, got {tuple(shape)}")
    if shape[0] % info.elements:
        raise ValueError(
            f"[tensor_bytes] expected a first dimension in multiples of {info.elements} ({info.name}), got {shape[0]}"
        )
    n_weights = 1
    for size in shape:
        n_weights *= int(size)
    return n_weights // info.elements * info.bytes


def dequantize(data: npt.ArrayLike, type_name: str, shape: Sequence[int]) -> Values:
    """Decode a tensor, or a run of its rows, to fp32.

    data       any shape            uint8    the bytes, quant block after quant block
    type_name  -                    str      "IQ2_XS"
    shape      -                    int      ggml order, fastest dimension first
    return     shape, reversed      float32

    Errors: ValueError for an unknown type, or where the number of bytes is not that of the shape.
    Source: llama.cpp, ggml/src/ggml-quants.c (dequantize_row_*).

    >>> block = np.concatenate([np.array([2.0], "<f2").view(np.uint8), np.arange(32, dtype=np.uint8)])
    >>> dequantize(block, "Q8_0", (32, 1))[0, :4].tolist()
    [0.0, 2.0, 4.0, 6.0]
    """
    info = type_info(type_name)
    raw = np.ascontiguousarray(data)
    if raw.dtype != np.uint8:
        raise ValueError(f"[dequantize] expected uint8 bytes, got {raw.dtype}")
    expected = tensor_bytes(type_name, shape)
    if raw.size != expected:
        raise ValueError(
            f"[dequantize] expected {expected} bytes for {info.name} {tuple(shape)} "
            f"({info.bytes} bytes per {info.elements} weights), got {raw.size}"
        )
    blocks = raw.reshape(-1, info.bytes)
    values = np.empty((len(blocks), info.elements), dtype=np.float32)
    step = max(1, CHUNK_WEIGHTS // info.elements)
    # A scale may be infinite, NaN or huge in a damaged file: the arithmetic's answer is the answer.
    with np.errstate(over="ignore", invalid="ignore"):
        for first in range(0, len(blocks), step):
            values[first : first + step] = info.decode(blocks[first : first + step])
    return values.reshape(tuple(reversed([int(size) for size in shape])))
