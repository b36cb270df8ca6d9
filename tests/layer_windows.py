"""Windows over the cases' layers, and the bounds that a step's result is held to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from cases import LAYER_CASES, LayerCase
from kernel_checks import GEMM_BOUND, assert_near

import expertile
from expertile import reference
from expertile.layer_weights import LayerWeights
from expertile.measure import worst_token_rel_l2
from expertile.plan import make_plan

Array = npt.NDArray[Any]
EXACT_BOUND = 1e-3
SMALL_TILE = (16, 32, 32, 4)
POISON = 0xFFA5  # a NaN as half, twice a NaN as float, as an integer no id, row or count

# The shared expert's gate is one row, which files hold as F32: the engine takes no other type for it.
CASES = {
    case.name: replace(case, types={part: t for part, t in case.types.items() if part != "ffn_gate_inp_shexp"})
    for case in LAYER_CASES
}
# A layer of quantized types that the emulator runs in milliseconds.
QUICK = LayerCase(
    "quick", n_tokens=7, dim=64, n_experts=17, top_k=3, ffn=64, shared_ffn=32, low_rank=32,
    types={"ffn_gate_exps": "IQ4_NL", "ffn_up_exps": "Q8_0", "ffn_down_exps": "Q2_0", "hc_ffn_down": "Q5_0",
           "hc_ffn_up": "Q4_0", "ffn_gate_shexp": "Q8_0", "ffn_up_shexp": "Q5_1", "ffn_down_shexp": "IQ4_NL"},
)  # fmt: skip


def tensors_of(cases: Iterable[LayerCase]) -> dict[str, Any]:
    return {name: t for layer, case in enumerate(cases) for name, t in case.weights(layer).tensors.items()}


def model_of(*cases: LayerCase, tensors: dict[str, Any] | None = None) -> expertile.Model:
    """A model whose layers are these cases, all of one size."""
    first = cases[0]
    sizes = {
        "n_layers": len(cases),
        "dim": first.dim,
        "n_experts": first.n_experts,
        "top_k": first.top_k,
        "expert_ffn": [case.ffn for case in cases],
        "shared_ffn": first.shared_ffn,
        "n_streams": first.n_streams,
        "low_rank": first.low_rank,
        "rms_eps": 1e-6,
    }
    return expertile.Model.from_tensors(sizes, tensors_of(cases) if tensors is None else tensors)


def open_guarded(device_name: str, **options: Any) -> expertile.Device:
    """New buffers hold NaN (POISON over and over), guard words lie around them and are checked after each run."""
    defaults = {"threads": 1, "order": "shuffled", "seed": 5, "guard": True}
    return expertile.open_device(device_name, **(defaults | options))


def window_of(device_name: str, *cases: LayerCase, max_tokens: int = 0, **options: Any) -> expertile.Window:
    tiles = {"gate_up": SMALL_TILE, "down": SMALL_TILE}
    device = open_guarded(device_name)
    return expertile.Window(model_of(*cases), device, max_tokens or cases[0].n_tokens, **(tiles | options))


def poison(window: expertile.Window) -> None:
    """NaN into every buffer that the host can see, but those that hold state from call to call."""
    for name in window._core.buffer_names():
        if name in ("streams", "status", "saturated"):
            continue
        memory = window._core.host_view(name)
        if memory is not None:
            memory.view(np.uint16)[:] = POISON


def assert_product(got: Array, half: Array, exact: Array, name: str) -> None:
    """Worst token. `half`, `exact`: the product by the reference with fp16 operands, and by the exact one."""
    assert np.isfinite(got).all() and np.abs(half).max() > 0, name
    near, far = worst_token_rel_l2(got, half), worst_token_rel_l2(got, exact)
    assert min(near[0], far[0]) <= GEMM_BOUND, f"{name}: {near[0]:.2e} at token {near[1]}"
    assert far[0] <= EXACT_BOUND, f"{name}: {far[0]:.2e} from the exact product at token {far[1]}"


def assert_dense(got: Array, x: Array, weights: LayerWeights, part: str, name: str) -> None:
    """A dense product of what the kernel before it gave."""
    matrix, scale = weights.matrix(part), weights.scale(part)
    exact = reference.product(x, matrix, "exact", scale)
    if part in reference.FP32_PARTS and weights.tensor(part).type == "F32":
        size = abs(scale) * (np.abs(x).astype(np.float64) @ np.abs(matrix).T)
        assert_near(got.reshape(exact.shape), exact, name, size)  # few columns: a token's sum may be near zero
    else:
        assert_product(got, reference.product(x, matrix, "fp16", scale), exact, name)


class Layer:
    """A case, its window, and the reference's buffers as the kernels hold them. The last expert is without rows."""

    def __init__(self, device_name: str, case: LayerCase) -> None:
        self.case, self.weights, self.x = case, case.weights(), case.x()
        self.window = window_of(device_name, case)
        self.mixed = reference.hc_read(self.x, self.weights, "fp16")["mixed"].astype(np.float32)
        self.mixed_half = reference.to_half(self.mixed)[0]
        self.routed = reference.route(self.mixed, self.weights, "fp16")
        assert np.abs(self.x).max() > 0 and np.abs(self.mixed).max() > 0 and not self.routed["faults"]
        self.ids = np.where(self.routed["ids"] == case.n_experts - 1, np.int32(-1), self.routed["ids"])
        self.kept = self.ids >= 0
        self.route_weights = self.routed["weights"].astype(np.float32)
        columns = (-(-case.ffn // SMALL_TILE[1]), -(-case.dim // SMALL_TILE[1]))
        self.plan = make_plan(self.ids, self.route_weights, case.n_experts, SMALL_TILE[0], *columns)
        self.position = self.plan.position.reshape(self.ids.shape)
        self.rows = reference.gather(self.mixed_half, self.plan.row_token)
        self.real = self.plan.row_token >= 0
        assert self.kept.any() and not self.real.all()

    def by_token(self, rows: Array) -> Array:
        """Rows of the plan as [T, K * columns], zeros for skipped entries, as in the reference."""
        entries = np.where(self.kept[:, :, None], rows[self.position], rows.dtype.type(0))
        return entries.reshape(len(entries), -1)


@cache
def layer_of(device_name: str, name: str) -> Layer:
    return Layer(device_name, CASES[name])


def own_routing(window: expertile.Window, x: Array, layer: int = 0) -> tuple[Array, Array]:
    """ids, weights that the device chooses from the streams on."""
    routed = window.route(layer, window.hc_read(layer, x)["mixed"])
    return routed["ids"], routed["weights"]
