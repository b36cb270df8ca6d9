"""Stage by stage: each step of a Window is fed the reference's buffers and held to the bounds of its kind.

Exact, bit for bit: plan, gather, combine. fp32 elementwise within 2e-6, half within one unit in the last place, route
weights within 1e-6. Products, worst token: relative L2 of 5e-5 to the reference with fp16 operands (or to the exact
one), 1e-3 to the exact one. Where a step holds several kernels, each is judged on what the kernel before it gave.
Every step starts on buffers full of NaN; guard words lie around them.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace

import numpy as np
import pytest
from kernel_checks import assert_half, assert_near
from layer_windows import (
    CASES,
    EXACT_BOUND,
    Layer,
    assert_dense,
    assert_product,
    layer_of,
    own_routing,
    poison,
)

from expertile import reference
from expertile.layer_weights import WeightArray
from expertile.measure import assert_bitwise_equal, compare_ids, worst_token_rel_l2


@pytest.fixture(params=list(CASES))
def layer(request: pytest.FixtureRequest, device_name: str) -> Layer:
    prepared = layer_of(device_name, request.param)
    poison(prepared.window)
    return prepared


def test_hc_read(layer: Layer) -> None:
    case, w, x = layer.case, layer.weights, layer.x
    got = layer.window.hc_read(0, x)
    want = reference.hc_read(x, w, "fp16")
    assert_near(got["inverse_rms"], want["inv_rms"], "inverse_rms")
    xn = want["xn"].reshape(len(x), -1)
    assert_half(got["normed_half"], xn, "normed_half")
    assert_dense(got["low_rank"], got["normed_half"], w, "hc_ffn_down", "low_rank")
    assert_half(got["low_rank_half"], reference.silu(got["low_rank"].astype(np.float64) / case.n_streams), "low_rank")
    gate = reference.product(got["low_rank_half"], w.matrix("hc_ffn_up"), "fp16").reshape(x.shape)
    mixed = (want["xn"] * reference.sigmoid(gate)).sum(axis=1) / case.n_streams
    assert_product(got["mixed"], mixed, reference.hc_read(x, w, "exact")["mixed"], "mixed")
    assert_bitwise_equal(got["mixed_half"], reference.to_half(got["mixed"])[0], "mixed_half")
    keeps_fp32 = w.tensor("hc_ffn_inject").type == "F32"
    assert_dense(got["inject"], xn if keeps_fp32 else got["normed_half"], w, "hc_ffn_inject", "inject")


def test_route(layer: Layer) -> None:
    got = layer.window.route(0, layer.mixed)
    assert_dense(got["logits"], layer.mixed, layer.weights, "ffn_gate_inp", "logits")
    ids = compare_ids(got["ids"], layer.routed["ids"], layer.routed["logits"], 1e-5)
    assert ids.ok, ids
    _, weights, _ = reference.route_topk(got["logits"], layer.case.top_k)
    assert np.abs(got["weights"] - weights).max() <= 1e-6


def test_plan_and_gather(layer: Layer) -> None:
    got = layer.window.plan(layer.ids, layer.route_weights)
    for name, want in layer.plan.arrays().items():
        if name != "block_offset":  # not every variant makes it
            assert_bitwise_equal(got[name], want, name)
    assert_bitwise_equal(layer.window.gather(got, layer.mixed_half), layer.rows, "rows")


def test_experts(layer: Layer) -> None:
    w, plan, real = layer.weights, layer.plan, layer.real
    got = layer.window.experts(0, plan.arrays(), np.where(real[:, None], layer.rows, np.float16(np.nan)))
    half, exact = (reference.experts(layer.mixed, layer.ids, w, operands) for operands in ("fp16", "exact"))
    n_tokens = len(layer.x)
    for name in ("gate", "up"):
        wanted = (step[name].reshape(n_tokens, -1) for step in (half, exact))
        assert_product(layer.by_token(got[name]), *wanted, name)
    with np.errstate(over="ignore", invalid="ignore"):
        hidden = reference.silu(got["gate"]) * got["up"].astype(np.float64)
    assert_half(got["hidden"][real], hidden[real], "hidden")
    assert (got["hidden"][~real] == 0).all()
    for expert, first, n, _ in plan.tiles.tolist():
        h, scale = got["hidden"][first : first + n], w.scale("ffn_down_exps", expert)
        want = reference.product(h, w.expert("down", expert), "fp16", scale)
        assert_product(got["expert_out"][first : first + n], want, want, f"expert_out of {expert}")
    if layer.case.special != "large_product":  # saturated: not the exact result, and not meant to be
        down = exact["down"].reshape(n_tokens, -1)
        assert worst_token_rel_l2(layer.by_token(got["expert_out"]), down)[0] <= EXACT_BOUND


def test_combine(layer: Layer) -> None:
    """Rows of padding hold NaN and stay out."""
    plan = layer.plan
    y = np.full((plan.n_rows, layer.case.dim), np.nan, np.float32)
    down = reference.experts(layer.mixed, layer.ids, layer.weights, "fp16")["down"]
    y[layer.position[layer.kept]] = down[layer.kept].astype(np.float32)
    got = layer.window.combine(plan.arrays(), y)
    assert np.isfinite(got).all() and np.abs(got).max() > 0
    assert_bitwise_equal(got, reference.combine_fp32(layer.position, plan.row_weight, y), "routed")


def test_shared(layer: Layer) -> None:
    w, got = layer.weights, layer.window.shared(0, layer.mixed)
    for name, part in (("shared_gate", "ffn_gate_shexp"), ("shared_up", "ffn_up_shexp")):
        assert_dense(got[name], layer.mixed, w, part, name)
    assert_dense(got["shared_scalar"], layer.mixed, w, "ffn_gate_inp_shexp", "shared_scalar")
    assert_half(got["shared_hidden"], reference.silu(got["shared_gate"]) * got["shared_up"], "shared_hidden")
    assert_dense(got["shared_out"], got["shared_hidden"], w, "ffn_down_shexp", "shared_out")


def test_hc_write(layer: Layer) -> None:
    w, case = layer.weights, layer.case
    whole = reference.layer(layer.x, w, "fp16", (layer.ids, layer.route_weights))
    side = reference.shared(layer.mixed, w, "fp16")
    arrays = [a.astype(np.float32) for a in (whole["routed"], side["down"], side["gate_logit"], whole["inject"])]
    routed, down, logit, inject = arrays
    got = layer.window.hc_write(layer.x, *arrays)
    opened = reference.sigmoid(logit)[:, None] * down
    strength = 2 * reference.sigmoid(inject.astype(np.float64) / case.n_streams)[:, :, None]
    size = np.abs(layer.x) + strength * (np.abs(routed) + np.abs(opened))[:, None]
    assert_near(got, reference.hc_write(layer.x, inject, routed + opened), "streams", size)


def test_whole_layer(layer: Layer) -> None:
    """From the streams on, with the ids that the device chose."""
    window = layer.window
    before = window.saturated
    got = window.moe_layer(0, layer.x)
    saturated = window.saturated - before
    routing = own_routing(window, layer.x)
    exact = reference.layer(layer.x, layer.weights)
    ids = compare_ids(routing[0], exact["ids"], exact["logits"], 8e-3)
    assert ids.ok and ids.swaps <= 2, ids
    want = reference.layer(layer.x, layer.weights, "fp16", routing)
    assert want["out"].any() and (saturated > 0) == (want["saturated"] > 0)
    update = got.astype(np.float64) - layer.x  # what the layer adds, by itself
    assert worst_token_rel_l2(update, want["out_streams"] - layer.x)[0] <= EXACT_BOUND
    if not want["saturated"]:
        exact = reference.layer(layer.x, layer.weights, "exact", routing)
        assert worst_token_rel_l2(got, exact["out_streams"])[0] <= EXACT_BOUND


# A check that cannot fail proves nothing


@pytest.mark.parametrize(
    ("part", "check"),
    [
        ("hc_ffn_norm", test_hc_read),
        ("hc_ffn_down", test_hc_read),
        ("hc_ffn_up", test_hc_read),
        ("hc_ffn_inject", test_hc_read),
        ("ffn_gate_inp", test_route),
        ("ffn_gate_exps", test_experts),
        ("ffn_up_exps", test_experts),
        ("ffn_down_exps", test_experts),
        ("ffn_gate_inp_shexp", test_shared),
        ("ffn_gate_shexp", test_shared),
        ("ffn_up_shexp", test_shared),
        ("ffn_down_shexp", test_shared),
    ],
)
def test_one_weight_wrong_by_a_twentieth_fails(device_name: str, part: str, check: Callable[[Layer], None]) -> None:
    """The device holds a weight other than the reference's: one of all the layer's."""
    layer = copy(layer_of(device_name, "plain"))
    check(layer)
    name = f"blk.0.{part}.weight"
    right = layer.weights.tensors[name]
    assert right.type == "F32"
    values = right.data.view(np.float32).copy()
    values[np.argmax(np.abs(values[: len(values) // 4]))] *= 1.05
    changed = {**layer.weights.tensors, name: WeightArray("F32", right.shape, values.view(np.uint8))}
    layer.weights = replace(layer.weights, tensors=changed)
    with pytest.raises(AssertionError):
        check(layer)


def test_order_of_slots_matters_to_the_check(device_name: str) -> None:
    layer = copy(layer_of(device_name, "wide"))
    layer.position, layer.kept = layer.position[:, ::-1], layer.kept[:, ::-1]
    with pytest.raises(AssertionError, match="routed"):
        test_combine(layer)
