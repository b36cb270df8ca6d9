"""The kernels' decoders (metal/include/quant.h) against the `gguf` package, bit for bit, on every device."""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt
import pytest

from expertile import _core, quants

gguf = pytest.importorskip("gguf")

Bytes = npt.NDArray[np.uint8]
Values = npt.NDArray[np.float32]

N_BLOCKS = 70
# Every class of fp16: zeros, the smallest and largest subnormal, normal, the largest, infinities, NaN.
SCALES = np.array(
    [0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x3C00, 0xBC00, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E01, 0xFE01],
    dtype="<u2",
)
KINDS = ("random", "scales", "zeros", "ones")
# F32 and F16 too are decoded 8 at a time: a length that is no multiple of it.
SINGLE_VALUES = 8 * 300 + 5


def raw_blocks(type_name: str, kind: str) -> Bytes:
    """Bytes of quant blocks; "scales" puts every class of fp16 into the fp16 fields."""
    info = quants.type_info(type_name)
    n_blocks = SINGLE_VALUES if info.elements == 1 else N_BLOCKS
    if kind in ("zeros", "ones"):
        return np.full((n_blocks, info.bytes), 0 if kind == "zeros" else 255, dtype=np.uint8)
    rng = np.random.default_rng(11)
    raw = rng.integers(0, 256, (n_blocks, info.bytes), dtype=np.uint8)
    if kind == "scales":
        for field, at in enumerate(info.half_offsets):
            classes = SCALES[(np.arange(n_blocks) // len(SCALES) ** field) % len(SCALES)]
            raw[:, at : at + 2] = classes.view(np.uint8).reshape(-1, 2)
    return raw


def oracle(type_name: str, raw: Bytes) -> Values:
    """What the `gguf` package decodes; Q2_0, which it does not know, by its formula."""
    with np.errstate(all="ignore"):
        if type_name != "Q2_0":
            kind = gguf.GGMLQuantizationType[type_name]
            return np.asarray(gguf.quants.dequantize(raw.reshape(-1), kind), dtype=np.float32).reshape(-1)
        d = raw[:, :2].copy().view("<f2").astype(np.float32)
        q = (raw[:, 2:, None] >> np.array([0, 2, 4, 6], dtype=np.uint8)) & 3
        return np.asarray(d * (q.reshape(len(raw), 64).astype(np.float32) - np.float32(1))).reshape(-1)


def decoded(device: _core.Device, type_name: str, raw: Bytes, n_values: int) -> Values:
    """dequantize_<format> of the device, its output poisoned beforehand."""
    y = np.full(n_values + 8, -12345.0, dtype=np.float32)
    grid = [-(-n_values // (8 * 256)), 1, 1]
    _core.run_kernel(device, "dequantize_" + type_name.lower(), struct.pack("<Q", n_values), [raw.reshape(-1), y], grid)
    assert (y[n_values:] == -12345.0).all(), "wrote behind the last value"
    return y[:n_values]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("type_name", quants.TYPES)
def test_decoder_is_bit_equal(device: _core.Device, type_name: str, kind: str) -> None:
    raw = raw_blocks(type_name, kind)
    want = oracle(type_name, raw)
    got = decoded(device, type_name, raw, len(want))
    # Strict: signed zeros and subnormals included; only NaN equals NaN.
    differs = (got.view(np.uint32) != want.view(np.uint32)) & ~(np.isnan(got) & np.isnan(want))
    first = int(np.argmax(differs))
    assert not differs.any(), f"{np.count_nonzero(differs)} differ, first {first}: {got[first]!r}, not {want[first]!r}"


def test_every_code_is_met(device: _core.Device) -> None:
    """Random bytes must reach every entry of the grids, else the comparison above proves nothing about them."""
    for type_name, entries in (("IQ2_XXS", 256), ("IQ2_XS", 512), ("IQ2_S", 1024), ("IQ3_XXS", 256), ("IQ3_S", 512)):
        info, group = quants.type_info(type_name), 4 if type_name.startswith("IQ3") else 8
        raw = np.random.default_rng(5).integers(0, 256, (300, info.bytes), dtype=np.uint8)
        raw[:, info.half_offsets[0] : info.half_offsets[0] + 2] = np.array([0x3C00], dtype="<u2").view(np.uint8)
        values = decoded(device, type_name, raw, 300 * info.elements)
        want = oracle(type_name, raw)
        assert np.array_equal(values.view(np.uint32), want.view(np.uint32))
        shapes = np.abs(values.reshape(-1, group))
        scale = shapes.min(axis=1, keepdims=True)
        assert len(np.unique(np.round(shapes / scale, 3), axis=0)) > entries // 4
