"""The named cases of the tests, as data, and builders of random weights.

`PLAN_CASES` are lists of chosen experts, `GEMM_CASES` sizes and types of matrix products, `LAYER_CASES` whole layers.
Sizes are odd, the last expert is without rows where a token's ids are distinct, and each case has its own fixed seed.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from expertile.layer_weights import LayerWeights, TensorLike, WeightArray
from expertile.quants import TYPES, tensor_bytes, type_info

Routing = Literal["given", "distinct", "repeats", "one_expert", "one_each", "skipped", "third_skipped", "zipf"]

# minimum = -ratio * scale makes a block's weights about zero on average.
MINIMUM_RATIO = {"Q5_1": -15.5, "Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}


def seed_of(name: str) -> int:
    return zlib.crc32(name.encode())


@dataclass(frozen=True)
class PlanCase:
    """Chosen experts: T tokens, E experts, K slots, and how the ids are drawn."""

    name: str
    n_tokens: int
    n_experts: int
    top_k: int
    routing: Routing = "distinct"
    given: tuple[tuple[int, ...], ...] = ()
    tile_rows: int = 16
    big: bool = False  # slow where a device is emulated

    def ids(self) -> npt.NDArray[np.int32]:
        """int32 [T, K]."""
        return _draw_ids(self, np.random.default_rng(seed_of(self.name)))

    def weights(self) -> npt.NDArray[np.float32]:
        """float32 [T, K], each token's summing to about 1."""
        raw = np.random.default_rng(seed_of(self.name) + 1).random((self.n_tokens, self.top_k), dtype=np.float32) + 0.1
        return (raw / raw.sum(axis=1, keepdims=True)).astype(np.float32)


def _draw_ids(case: PlanCase, rng: np.random.Generator) -> npt.NDArray[np.int32]:
    shape = (case.n_tokens, case.top_k)
    if case.routing == "given":
        return np.array(case.given, dtype=np.int32).reshape(shape)
    if case.routing == "skipped":
        return np.full(shape, -1, dtype=np.int32)
    if case.routing == "one_expert":
        return np.full(shape, case.n_experts // 2, dtype=np.int32)
    if case.routing == "one_each":
        return (np.arange(case.n_tokens * case.top_k, dtype=np.int32) % case.n_experts).reshape(shape)
    if case.routing == "repeats":
        return rng.integers(0, case.n_experts, shape, dtype=np.int32)
    # Distinct experts a token, one expert always without rows where enough are left.
    usable = case.n_experts - 1 if case.n_experts > case.top_k else case.n_experts
    bias = np.zeros(usable)
    if case.routing == "zipf":
        bias = -1.1 * np.log(np.arange(1, usable + 1))
    keys = rng.gumbel(size=(case.n_tokens, usable)) + bias
    ids = np.argsort(-keys, axis=1)[:, : case.top_k].astype(np.int32)
    if case.routing == "third_skipped":
        ids.reshape(-1)[::3] = -1
    return ids


def _plan_cases() -> list[PlanCase]:
    cases = [
        PlanCase("skipped first slot", 1, 8, 2, "given", ((-1, 3),)),
        PlanCase("skipped slots of several tokens", 3, 8, 2, "given", ((-1, 3), (5, -1), (-1, -1))),
        PlanCase("every third skipped", 64, 512, 10, "third_skipped"),
        PlanCase("one expert in all slots of a token", 1, 8, 8, "one_expert"),
        PlanCase("repeated experts", 33, 5, 4, "repeats"),
        PlanCase("one token, ten experts", 1, 512, 10),
        PlanCase("one token each", 512, 512, 1, "one_each"),
        PlanCase("no tokens", 0, 8, 2),
        PlanCase("all skipped", 5, 8, 2, "skipped"),
        PlanCase("one expert, 70000 tokens", 70_000, 8, 1, "one_expert", big=True),
        PlanCase("8192 tokens, 512 experts", 8192, 512, 10, big=True),
        PlanCase("skewed", 257, 512, 10, "zipf"),
        PlanCase("a block exactly", 128, 33, 8),
        PlanCase("a block and one entry", 1025, 33, 1),
        PlanCase("as many tiles as there can be", 85, 5, 1, "one_each"),  # 17 rows of each expert
        PlanCase("tile of 32 rows", 67, 33, 5, tile_rows=32),
        PlanCase("tile of 64 rows", 67, 33, 5, tile_rows=64),
    ]
    cases += [PlanCase(f"K = {k}", 37, max(33, k), k) for k in (1, 2, 3, 5, 7, 8, 9, 10, 11, 12, 16, 22, 32)]
    cases += [
        PlanCase(f"E = {e}", 129, e, min(e, 3)) for e in (1, 5, 33, 128, 256, 512, 513, 1023, 1024, 1025, 2048, 4096)
    ]
    cases += [PlanCase(f"T = {t}", t, 33, 4) for t in (1, 2, 3, 15, 16, 17, 31, 32, 33, 255, 256, 257)]
    return cases


PLAN_CASES = _plan_cases()

Special = Literal["", "large_activation", "large_product", "integers", "tied_logits"]


@dataclass(frozen=True)
class GemmCase:
    """A product of T rows with a quantized [n_cols, n_inner] matrix."""

    name: str
    type: str
    n_rows: int
    n_inner: int
    n_cols: int
    special: Special = ""

    def weight(self) -> WeightArray:
        rng = np.random.default_rng(seed_of(self.name))
        if self.special == "integers":
            return integer_weight(self.type, (self.n_inner, self.n_cols), rng)
        return random_weight(self.type, (self.n_inner, self.n_cols), rng)

    def x(self) -> npt.NDArray[np.float32]:
        rng = np.random.default_rng(seed_of(self.name) + 1)
        if self.special == "integers":
            return rng.integers(-3, 4, (self.n_rows, self.n_inner)).astype(np.float32)
        x = rng.standard_normal((self.n_rows, self.n_inner), dtype=np.float32)
        if self.special == "large_activation":
            x[-1, self.n_inner // 2] = 1e5
        return x


def _gemm_cases() -> list[GemmCase]:
    cases = []
    for name, info in TYPES.items():
        inner = 2 * info.elements if info.elements > 1 else 96
        cases.append(GemmCase(f"{name} odd rows and columns", name, 17, inner, 72))
        cases.append(GemmCase(f"{name} integers", name, 5, inner, 40, "integers"))
    cases += [
        GemmCase("inner 32", "Q8_0", 3, 32, 40),
        GemmCase("inner 96", "Q4_0", 33, 96, 72),
        GemmCase("inner 160", "IQ4_NL", 16, 160, 40),
        GemmCase("inner 588", "F16", 7, 588, 40),
        GemmCase("inner 20", "F32", 7, 20, 24),
        GemmCase("one row, one column", "Q8_0", 1, 64, 1),
        GemmCase("activation of 1e5", "Q8_0", 2, 64, 40, "large_activation"),
    ]
    return cases


GEMM_CASES = _gemm_cases()


@dataclass(frozen=True)
class LayerCase:
    """A layer's sizes and the types of its tensors; a part not in `types` is F32."""

    name: str
    n_tokens: int = 21
    dim: int = 64
    n_experts: int = 5
    top_k: int = 2
    ffn: int = 40
    shared_ffn: int = 24
    low_rank: int = 20
    n_streams: int = 4
    types: dict[str, str] = field(default_factory=dict)
    fused: bool = False
    scales: bool = False
    special: Special = ""

    def weights(self, layer: int = 0) -> LayerWeights:
        return LayerWeights(random_layer(self, layer), layer, self.top_k)

    def x(self) -> npt.NDArray[np.float32]:
        """Residual streams, float32 [T, C, D]; values that half holds exactly."""
        rng = np.random.default_rng(seed_of(self.name) + 7)
        x = rng.standard_normal((self.n_tokens, self.n_streams, self.dim)) * (1 + np.arange(self.n_streams))[:, None]
        return x.astype(np.float16).astype(np.float32)


# Down's inner size is 640 in the model, no multiple of 256: its type has quant blocks of 32 or 64.
MIXED_TYPES = {
    "ffn_gate_exps": "IQ2_XS", "ffn_up_exps": "Q4_K", "ffn_down_exps": "IQ4_NL", "hc_ffn_down": "Q8_0",
    "hc_ffn_up": "Q8_0", "ffn_gate_shexp": "Q4_K", "ffn_up_shexp": "Q5_K", "ffn_down_shexp": "Q8_0",
}  # fmt: skip
OTHER_TYPES = {
    "ffn_gate_exps": "IQ3_S", "ffn_up_exps": "IQ2_XXS", "ffn_down_exps": "Q2_0", "hc_ffn_down": "Q6_K",
    "hc_ffn_up": "IQ4_NL", "ffn_gate_shexp": "IQ4_XS", "ffn_up_shexp": "Q3_K", "ffn_down_shexp": "Q5_1",
    "ffn_gate_inp": "F16", "hc_ffn_inject": "F16", "ffn_gate_inp_shexp": "BF16",
}  # fmt: skip
BLOCK_SIZES = {"dim": 256, "ffn": 64, "shared_ffn": 64, "low_rank": 32}

LAYER_CASES = [
    LayerCase("plain"),
    LayerCase("one token", n_tokens=1),
    LayerCase("wide", n_tokens=19, dim=32, n_experts=130, top_k=10, ffn=8, shared_ffn=8, low_rank=4),
    LayerCase("mixed types", **BLOCK_SIZES, types=MIXED_TYPES),  # type: ignore[arg-type]
    LayerCase("other types", **BLOCK_SIZES, types=OTHER_TYPES),  # type: ignore[arg-type]
    LayerCase("fused gate and up", fused=True),
    LayerCase("scales", scales=True),
    LayerCase("fused with scales", fused=True, scales=True, n_streams=2),
    LayerCase("product over the half limit", special="large_product"),
    LayerCase("tied logits", special="tied_logits", n_experts=9, top_k=4),
]


def random_blocks(type_name: str, n_blocks: int, rng: np.random.Generator, scale: float) -> npt.NDArray[np.uint8]:
    """Quant blocks of random bits whose fp16 scale is `scale`: uint8 [n_blocks, bytes]. Not for F32, F16, BF16."""
    info = type_info(type_name)
    blocks = rng.integers(0, 256, (n_blocks, info.bytes), dtype=np.uint8)
    values = [scale, scale * MINIMUM_RATIO.get(type_name, 0.0)]
    for at, value in zip(info.half_offsets, values, strict=False):
        blocks[:, at : at + 2] = np.array([value], dtype="<f2").view(np.uint8)
    return blocks


def random_weight(
    type_name: str, shape: tuple[int, ...], rng: np.random.Generator, deviation: float | None = None
) -> WeightArray:
    """A tensor (ggml shape) of about normal size: standard deviation 1 / sqrt(shape[0]) unless given."""
    deviation = shape[0] ** -0.5 if deviation is None else deviation
    info = type_info(type_name)
    if not info.half_offsets:
        return plain_weight(type_name, rng.standard_normal(tuple(reversed(shape))) * deviation)
    sample = info.decode(random_blocks(type_name, 64, np.random.default_rng(0), 1.0))
    n_blocks = tensor_bytes(type_name, shape) // info.bytes
    blocks = random_blocks(type_name, n_blocks, rng, deviation / float(np.std(sample)))
    # Scales that differ from block to block, so that a decoder that reads a neighbour's is seen.
    for at in info.half_offsets:
        halves = np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2")
        blocks[:, at : at + 2] = (halves * rng.uniform(0.7, 1.3, (n_blocks, 1))).astype("<f2").view(np.uint8)
    return WeightArray(type_name, shape, blocks.reshape(-1))


def integer_weight(type_name: str, shape: tuple[int, ...], rng: np.random.Generator) -> WeightArray:
    """A tensor of multiples of one power of two: its products with small integers are exact in any order."""
    info = type_info(type_name)
    if not info.half_offsets:
        return plain_weight(type_name, rng.integers(-8, 9, tuple(reversed(shape))).astype(np.float64))
    n_blocks = tensor_bytes(type_name, shape) // info.bytes
    blocks = random_blocks(type_name, n_blocks, rng, 1.0)
    for at in info.half_offsets[1:]:
        blocks[:, at : at + 2] = np.array([1.0], dtype="<f2").view(np.uint8)
    return WeightArray(type_name, shape, blocks.reshape(-1))


def plain_weight(type_name: str, values: npt.NDArray[np.float64]) -> WeightArray:
    """An F32, F16 or BF16 tensor of the values [.., rows, inner]."""
    shape = tuple(reversed(values.shape))
    if type_name == "F16":
        raw = np.ascontiguousarray(values, dtype="<f2").reshape(-1).view(np.uint8)
    elif type_name == "BF16":
        bits = np.ascontiguousarray(values, dtype="<f4").reshape(-1).view(np.uint32)
        raw = (bits >> np.uint32(16)).astype("<u2").view(np.uint8)
    else:
        return WeightArray.from_values(values)
    return WeightArray(type_name, shape, raw)


def random_layer(case: LayerCase, layer: int = 0) -> dict[str, TensorLike]:
    """The tensors of one layer by their GGUF names."""
    rng = np.random.default_rng(seed_of(case.name) + 1000 * layer)
    streams = case.n_streams * case.dim
    shapes = {
        "hc_ffn_down": (streams, case.low_rank),
        "hc_ffn_up": (case.low_rank, streams),
        "hc_ffn_inject": (streams, case.n_streams),
        "ffn_gate_inp": (case.dim, case.n_experts),
        "ffn_gate_exps": (case.dim, case.ffn, case.n_experts),
        "ffn_up_exps": (case.dim, case.ffn, case.n_experts),
        "ffn_down_exps": (case.ffn, case.dim, case.n_experts),
        "ffn_gate_inp_shexp": (case.dim,),
        "ffn_gate_shexp": (case.dim, case.shared_ffn),
        "ffn_up_shexp": (case.dim, case.shared_ffn),
        "ffn_down_shexp": (case.shared_ffn, case.dim),
    }
    if case.fused:
        del shapes["ffn_gate_exps"], shapes["ffn_up_exps"]
        shapes["ffn_gate_up_exps"] = (case.dim, 2 * case.ffn, case.n_experts)
    deviations = {"ffn_gate_inp": 4.0 * case.dim**-0.5, "hc_ffn_inject": 4.0 * streams**-0.5}
    if case.special == "large_product":
        # Weights that half holds, products of silu(gate) * up that it does not.
        deviations |= {"ffn_gate_exps": 0.5, "ffn_up_exps": 1.2e4}
    tensors: dict[str, TensorLike] = {
        f"blk.{layer}.{part}.weight": random_weight(case.types.get(part, "F32"), shape, rng, deviations.get(part))
        for part, shape in shapes.items()
    }
    gamma = 1.0 + 0.3 * rng.standard_normal(streams)
    tensors[f"blk.{layer}.hc_ffn_norm.weight"] = WeightArray.from_values(gamma)
    if case.special == "tied_logits":
        # Experts e and e + 3 have one router row: every choice is a tie.
        rows = rng.standard_normal((3, case.dim))[np.arange(case.n_experts) % 3]
        tensors[f"blk.{layer}.ffn_gate_inp.weight"] = WeightArray.from_values(rows)
    if case.scales:
        for part in ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"):
            tensors[f"blk.{layer}.{part}.scale"] = WeightArray.from_values(rng.uniform(0.5, 2.0, case.n_experts))
        for part in ("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"):
            tensors[f"blk.{layer}.{part}.scale"] = WeightArray.from_values(rng.uniform(0.5, 2.0, 1))
    return tensors
