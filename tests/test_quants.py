"""The numpy decoders against an independent implementation, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from cases import integer_weight, random_weight

from expertile import quants
from expertile.measure import assert_bitwise_equal

gguf = pytest.importorskip("gguf")

N_BLOCKS = 300
SCALES = (0.0, -0.0, 1.0, -1.0, 6e-8, -6e-8, 6.1e-5, 65504.0, -65504.0, np.inf, -np.inf, np.nan)


def blocks_of(type_name: str, kind: str) -> np.ndarray:
    info = quants.type_info(type_name)
    rng = np.random.default_rng(7)
    if kind in ("zeros", "ones"):
        return np.full((3, info.bytes), 0 if kind == "zeros" else 255, dtype=np.uint8)
    raw = rng.integers(0, 256, (N_BLOCKS, info.bytes), dtype=np.uint8)
    if kind == "scales":
        for at in info.half_offsets:
            raw[:, at : at + 2] = rng.choice(np.array(SCALES), (N_BLOCKS, 1)).astype("<f2").view(np.uint8)
    return raw


def independent(type_name: str, raw: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return (
            gguf.quants.dequantize(raw.reshape(-1), gguf.GGMLQuantizationType[type_name]).astype(np.float32).reshape(-1)
        )


def q2_0_by_formula(raw: np.ndarray) -> np.ndarray:
    values = []
    for block in raw:
        d = np.float32(block[:2].view("<f2")[0])
        for j in range(64):
            q = (int(block[2 + j // 4]) >> (2 * (j % 4))) & 3
            with np.errstate(invalid="ignore"):
                values.append(np.float32(q - 1) * d)
    return np.array(values, dtype=np.float32)


@pytest.mark.parametrize("kind", ["random", "zeros", "ones", "scales"])
@pytest.mark.parametrize("type_name", quants.TYPES)
def test_decoder_equals_independent_one(type_name: str, kind: str) -> None:
    info, raw = quants.TYPES[type_name], blocks_of(type_name, kind)
    got = quants.dequantize(raw, type_name, (raw.shape[0] * info.elements,))
    want = q2_0_by_formula(raw) if type_name == "Q2_0" else independent(type_name, raw)
    # Strict: signed zeros and subnormals included; NaN equals NaN.
    strict = (got.view(np.uint32) != want.view(np.uint32)) & ~(np.isnan(got) & np.isnan(want))
    assert not strict.any()
    assert_bitwise_equal(got, want, type_name)
    assert kind == "zeros" or np.count_nonzero(got) > 0


@pytest.mark.parametrize("type_name", quants.TYPES)
def test_every_byte_of_a_block_matters(type_name: str) -> None:
    info = quants.TYPES[type_name]
    weight = random_weight(type_name, (info.elements * 2, 3), np.random.default_rng(5))
    before = quants.dequantize(weight.data, type_name, weight.shape)
    assert 0.2 < before.std() * (info.elements * 2) ** 0.5 < 2.5
    for at in range(info.bytes):
        changed = weight.data.copy()
        changed[info.bytes + at] ^= 255
        after = quants.dequantize(changed, type_name, weight.shape)
        where = np.flatnonzero(before != after)
        assert where.size and where.min() >= info.elements and where.max() < 2 * info.elements


@pytest.mark.parametrize("type_name", quants.TYPES)
def test_sizes_are_those_of_the_format(type_name: str) -> None:
    info = quants.TYPES[type_name]
    if type_name != "Q2_0":
        assert info.id == gguf.GGMLQuantizationType[type_name].value
        assert (info.elements, info.bytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    weight = integer_weight(type_name, (info.elements, 5), np.random.default_rng(2))
    values = quants.dequantize(weight.data, type_name, weight.shape)
    assert np.array_equal(values * 8, np.round(values * 8)) and np.count_nonzero(values)


def test_long_tensors_are_decoded_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = blocks_of("Q4_K", "random")
    whole = quants.dequantize(raw, "Q4_K", (256, N_BLOCKS))
    monkeypatch.setattr(quants, "CHUNK_WEIGHTS", 256 * 7)
    assert_bitwise_equal(quants.dequantize(raw, "Q4_K", (256, N_BLOCKS)), whole, "chunks")


@pytest.mark.parametrize(
    ("type_name", "shape", "n_bytes", "message"),
    [
        ("Q9_9", (32,), 34, "got 'Q9_9'"),
        ("Q8_0", (40,), 34, "multiples of 32"),
        ("Q8_0", (32, 0), 0, "at least 1"),
        ("Q8_0", (32, 2), 67, "expected 68 bytes"),
        # 128 weights in 34 bytes: another layout under the same number.
        ("Q2_0", (128,), 34, r"expected 36 bytes for Q2_0 \(128,\) \(18 bytes per 64 weights\), got 34"),
    ],
)
def test_wrong_sizes_are_refused(type_name: str, shape: tuple[int, ...], n_bytes: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quants.dequantize(np.zeros(n_bytes, dtype=np.uint8), type_name, shape)


def test_bytes_of_another_type_are_refused() -> None:
    with pytest.raises(ValueError, match="expected uint8"):
        quants.dequantize(np.zeros(34, dtype=np.int8), "Q8_0", (32,))
    spread = np.zeros(68, dtype=np.uint8)
    spread[::2] = np.arange(34)
    got = quants.dequantize(spread[::2], "Q8_0", (32,))
    assert_bitwise_equal(got, quants.dequantize(np.arange(34, dtype=np.uint8), "Q8_0", (32,)), "strided")
