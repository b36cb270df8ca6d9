"""What a caller may count on, in the places where engines of this kind have gone wrong: each test names one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from cases import MIXED_TYPES, OTHER_TYPES, PLAN_CASES, LayerCase
from kernel_checks import TILES, assert_half, at_page_end
from layer_windows import (
    EXACT_BOUND,
    QUICK,
    SMALL_TILE,
    Array,
    assert_dense,
    layer_of,
    model_of,
    open_guarded,
    own_routing,
    poison,
    tensors_of,
    window_of,
)

import expertile
from expertile import _core, reference
from expertile.layer_weights import LayerWeights, WeightArray
from expertile.measure import assert_bitwise_equal, rel_l2, worst_token_rel_l2
from expertile.plan import make_plan, max_rows
from expertile.quants import TYPES

TWO_PRODUCTS = 2e-4  # one after the other, a half in between that may round the other way


def small_case(name: str, **sizes: Any) -> LayerCase:
    return LayerCase(name, **({"dim": 32, "ffn": 8, "shared_ffn": 8, "low_rank": 4} | sizes))


def expert_outputs(window: expertile.Window, plan: dict[str, Array], mixed: Array) -> Array:
    rows = window.gather(plan, reference.to_half(mixed)[0])
    out: Array = window.experts(0, plan, rows)["expert_out"]
    return out


def assert_layer(window: expertile.Window, weights: LayerWeights, x: Array, layer: int = 0) -> Array:
    """A whole layer against the exact reference, with the device's own choice of experts."""
    got: Array = window.moe_layer(layer, x)
    want = reference.layer(x, weights, "exact", own_routing(window, x, layer))["out_streams"]
    assert np.abs(x).max() > 0 and np.isfinite(got).all()
    assert worst_token_rel_l2(got, want)[0] <= EXACT_BOUND
    assert worst_token_rel_l2(got.astype(np.float64) - x, want - x)[0] <= 2 * EXACT_BOUND
    return got


# Routing and ids


@pytest.mark.parametrize(
    "name", ["every third skipped", "skipped first slot", "skipped slots of several tokens", "all skipped"]
)
def test_skipped_entries_weigh_nothing(device_name: str, name: str) -> None:
    planned = next(case for case in PLAN_CASES if case.name == name)
    ids, route_weights = planned.ids(), planned.weights()
    case = small_case(name, n_experts=planned.n_experts, top_k=planned.top_k)
    window = window_of(device_name, case, max_tokens=len(ids))
    poison(window)
    mixed = np.random.default_rng(3).standard_normal((len(ids), case.dim)).astype(np.float32)
    plan = window.plan(ids, route_weights)
    got = window.combine(plan, expert_outputs(window, plan, mixed))
    down = reference.experts(mixed, np.maximum(ids, 0), case.weights(), "fp16")["down"]  # skipped ones too
    want = reference.combine(np.maximum(ids, 0), np.where(ids >= 0, route_weights, 0), down)
    assert got.shape == want.shape and np.isfinite(got).all()
    assert worst_token_rel_l2(got, want)[0] <= TWO_PRODUCTS
    nothing = (ids < 0).all(axis=1)
    assert not got[nothing].any() and got[~nothing].any(axis=1).all()


def test_one_expert_in_all_slots_is_summed_slot_by_slot(device_name: str) -> None:
    case = small_case("all slots", n_experts=8, top_k=8)
    rng = np.random.default_rng(0)
    route_weights, mixed = rng.random((3, 8), np.float32), rng.standard_normal((3, 32)).astype(np.float32)
    ids = np.array([[5] * 8, [0, 1, 2, 3, 4, 5, 6, 6], [2] * 8], np.int32)  # expert 7 is without rows
    window = window_of(device_name, case)
    plan = window.plan(ids, route_weights)
    assert [tuple(tile[[0, 2]]) for tile in plan["tiles"]] == [(0, 1), (1, 1), (2, 9), (3, 1), (4, 1), (5, 9), (6, 2)]
    y = expert_outputs(window, plan, mixed)
    got = window.combine(plan, y)
    for token in range(3):
        total = np.zeros(32, np.float32)
        for slot in range(8):
            total = total + route_weights[token, slot] * y[plan["position"][8 * token + slot]]
        assert total.any()
        assert_bitwise_equal(got[token], total, f"token {token}")
    want = reference.combine(ids, route_weights, reference.experts(mixed, ids, case.weights(), "fp16")["down"])
    assert worst_token_rel_l2(got, want)[0] <= TWO_PRODUCTS


@pytest.mark.parametrize("top_k", [1, 2, 3, 5, 7, 8, 9, 10, 11, 12, 16, 22, 32])
def test_every_number_of_slots(device_name: str, top_k: int) -> None:
    case = small_case(f"K {top_k}", n_tokens=3, n_experts=33, top_k=top_k)
    assert_layer(window_of(device_name, case), case.weights(), case.x())


@pytest.mark.parametrize(("n_experts", "top_k", "limit"), [(64, 33, 32), (5, 6, 5), (5, 0, 5), (4097, 2, 4096)])
def test_sizes_over_a_limit_are_refused(n_experts: int, top_k: int, limit: int) -> None:
    case = LayerCase("limits", n_experts=n_experts, top_k=top_k, dim=4, ffn=4, shared_ffn=4, low_rank=4)
    with pytest.raises(ValueError, match=rf"expected 1 to {limit}, got"):
        model_of(case)


# Numbers of tokens, batches

LONG = small_case("long", n_tokens=257, n_experts=9, top_k=2)


@cache
def long_chunk(device_name: str) -> tuple[expertile.Window, Array]:
    window = window_of(device_name, LONG)
    return window, assert_layer(window, LONG.weights(), LONG.x())


@pytest.mark.parametrize("n_tokens", [1, 2, 3, 15, 16, 17, 31, 32, 33, 255, 256])
def test_every_number_of_tokens(device_name: str, n_tokens: int) -> None:
    """The result of 257 tokens, cut: a token does not depend on how many there are."""
    window, whole = long_chunk(device_name)
    poison(window)
    assert_bitwise_equal(window.moe_layer(0, LONG.x()[:n_tokens]), whole[:n_tokens], f"{n_tokens} tokens")


def test_no_tokens_is_no_work(device_name: str) -> None:
    window, c = window_of(device_name, QUICK), QUICK
    streams = np.zeros((0, c.n_streams, c.dim), np.float32)
    plan = window.plan(np.zeros((0, c.top_k), np.int32), np.zeros((0, c.top_k), np.float32))
    y = expert_outputs(window, plan, np.zeros((0, c.dim), np.float32))
    assert window.combine(plan, y).shape == y.shape == (0, c.dim)
    assert window.moe_layer(0, streams).shape == window.prompt_chunk(streams).shape == streams.shape
    assert window.hc_read(0, streams)["mixed"].shape == (0, c.dim)
    assert window.shared(0, np.zeros((0, c.dim), np.float32))["shared_out"].shape == (0, c.dim)


def windows_of_every_kind(device_name: str, model: expertile.Model, n_tokens: int) -> Iterable[tuple[str, Any]]:
    for tile in TILES:
        down = tile if tile[0] != 16 else TILES[1 - TILES.index(tile)]
        device = open_guarded(device_name)
        yield f"tiles {tile} {down}", expertile.Window(model, device, n_tokens, gate_up=tile, down=down)
    for threads in (2, 3):
        yield f"{threads} threads", expertile.Window(model, open_guarded(device_name, threads=threads), n_tokens)
    for variant in _core.plan_variants():
        yield f"plan {variant}", expertile.Window(model, open_guarded(device_name), n_tokens, plan=variant)
    if device_name == "emulator":
        for order in ("ascending", "reversed"):
            yield order, expertile.Window(model, open_guarded(device_name, order=order), n_tokens)


def test_a_token_is_the_same_alone_in_any_chunk_tile_plan_and_number_of_threads(device_name: str) -> None:
    case = replace(QUICK, n_tokens=35, n_experts=9)  # experts of one row, of some, of more than a tile
    x, model = case.x(), model_of(case)
    window = expertile.Window(model, open_guarded(device_name), len(x))
    want = assert_layer(window, case.weights(), x)
    assert len(np.unique(want, axis=0)) == len(x)
    for token in (0, 16, 34):
        assert_bitwise_equal(window.moe_layer(0, x[token : token + 1])[0], want[token], f"token {token} alone")
    for border in (1, 16, 33):
        parts = [window.moe_layer(0, part) for part in (x[:border], x[border:])]
        assert_bitwise_equal(np.concatenate(parts), want, f"chunks cut at {border}")
    assert_bitwise_equal(window.moe_layer(0, x[::-1])[::-1], want, "in reverse")
    for name, other in windows_of_every_kind(device_name, model, len(x)):
        poison(other)
        assert_bitwise_equal(other.moe_layer(0, x), want, name)


# Memory


def test_poisoned_scratch_reaches_no_result(device_name: str) -> None:
    """Whatever the buffers held, NaN or the last chunk's, the bits are the same; experts are without rows."""
    window, x = window_of(device_name, QUICK, max_tokens=20), QUICK.x()
    want = assert_layer(window, QUICK.weights(), x)  # on fresh memory: garbage, which is NaN
    poison(window)
    assert_bitwise_equal(window.moe_layer(0, x), want, "on NaN")
    window.moe_layer(0, np.tile(1e3 * x, (2, 1, 1)))
    assert_bitwise_equal(window.moe_layer(0, x), want, "after another chunk")
    for _ in range(10):
        assert_bitwise_equal(window.moe_layer(0, x), want, "again")
    rows = np.diff(window.plan(*own_routing(window, x))["expert_offset"].astype(np.int64))
    assert (rows == 0).any() and (rows > 0).any()


@pytest.mark.parametrize("tile", TILES)
def test_last_tile_of_one_row_at_the_end_of_every_buffer(device_name: str, tile: Any) -> None:
    """One token, every expert once: the plan fills its bound. Weights end where a page begins that cannot be read."""
    case = replace(QUICK, n_tokens=1, n_experts=3, top_k=3)
    tensors = {
        name: WeightArray(t.type, t.shape, at_page_end(np.asarray(t.data))) for name, t in tensors_of([case]).items()
    }
    model = model_of(case, tensors=tensors)
    window = expertile.Window(model, open_guarded(device_name), 1, gate_up=tile, down=tile)
    assert_layer(window, case.weights(), case.x())
    plan = window.plan(*own_routing(window, case.x()))
    assert plan["tiles"][-1].tolist() == [2, 2 * tile[0], 1, 0]
    assert plan["meta"][0] == 3 * tile[0] == max_rows(1, 3, 3, tile[0])


def test_8192_tokens_and_512_experts_fit_the_stated_memory() -> None:
    """Natively: the emulator's plan of this size is a test of the plan."""
    planned = next(case for case in PLAN_CASES if case.name == "8192 tokens, 512 experts")
    case = small_case("many", n_tokens=planned.n_tokens, n_experts=planned.n_experts, top_k=planned.top_k)
    window = expertile.Window(model_of(case), "cpu", case.n_tokens)
    t, e, k, d, c, f, fs, r = case.n_tokens, case.n_experts, case.top_k, case.dim, case.n_streams, case.ffn, 8, 4
    rows = t * k + e * 15
    by_token = 4 * (c * d + 2 * c + r + e + 2 * k + 1 + 2 * fs + 1 + 3 * d + k) + 2 * (c * d + r + d + fs)
    by_row = 4 * (2 + 1 / 4 + 2 * f + d) + 2 * (d + f)
    blocks = 2 * 4 * e * -(-t * k // 1024)
    assert window.memory() <= t * by_token + rows * by_row + blocks + 4 * (e + 1) + 4096
    ids, weights = planned.ids(), planned.weights()
    plan = window.plan(ids, weights)
    for name, want in make_plan(ids, weights, e, 16).arrays().items():
        if name not in ("block_offset", "meta"):
            assert_bitwise_equal(plan[name], want, name)
    x = case.x()
    whole = window.moe_layer(0, x)
    for first in (0, 4095, 8185):
        part = slice(first, first + 7)
        assert_bitwise_equal(window.moe_layer(0, x[part]), whole[part], f"tokens from {first}")
    assert_layer(window, case.weights(), x[-9:])


# Numbers over the limit of half


def saturating() -> tuple[expertile.Model, LayerWeights, np.ndarray]:
    """1e5 and more out of the norm, in one element of every token: gamma there is large."""
    case, x = QUICK, QUICK.x()
    tensors = dict(case.weights().tensors)
    gamma = case.weights().matrix("hc_ffn_norm").reshape(-1).copy()
    gamma[5] = 2e5
    tensors["blk.0.hc_ffn_norm.weight"] = WeightArray.from_values(gamma)
    x[:, 0, 5] = np.where(np.arange(len(x)) % 2, -4.0, 4.0)
    return model_of(case, tensors=tensors), LayerWeights(tensors, 0, case.top_k), x


def test_activation_over_the_half_limit_saturates_and_is_counted(device_name: str) -> None:
    model, weights, x = saturating()
    window = expertile.Window(model, open_guarded(device_name), len(x))
    got, want = window.hc_read(0, x), reference.hc_read(x, weights, "fp16")
    assert np.abs(want["xn"]).max() > 1e5 and want["saturated"] >= len(x)
    assert window.saturated == want["saturated"]
    assert got["normed_half"][0, 5] == 65504 and got["normed_half"][1, 5] == -65504
    assert_half(got["normed_half"], want["xn"].reshape(len(x), -1), "normed_half")
    assert_dense(got["low_rank"], got["normed_half"], weights, "hc_ffn_down", "low_rank")
    assert np.isfinite(window.moe_layer(0, x)).all()


@pytest.mark.parametrize("elementwise", ["scalar", "vector"])
def test_the_count_of_saturated_activations_does_not_wrap(device_name: str, elementwise: str) -> None:
    model, _, x = saturating()
    window = expertile.Window(model, open_guarded(device_name), len(x), elementwise=elementwise)
    window.moe_layer(0, x)
    once = window.saturated
    assert once >= len(x)
    low_word = 2**32 - once // 2
    window._core.write("saturated", np.array([low_word], np.uint32))
    for runs in (1, 2):
        window.moe_layer(0, x)
        assert window.saturated == low_word + runs * once


def test_product_over_the_half_limit_saturates_and_is_counted(device_name: str) -> None:
    layer = layer_of(device_name, "product over the half limit")
    before = layer.window.saturated
    got = layer.window.experts(0, layer.plan.arrays(), layer.rows)
    want = reference.experts(layer.mixed, layer.ids, layer.weights, "fp16")
    assert layer.window.saturated - before == want["saturated"] > 0
    assert np.count_nonzero(np.abs(got["hidden"][layer.real]) == 65504) >= want["saturated"]
    down = want["down"].reshape(len(layer.x), -1)
    assert worst_token_rel_l2(layer.by_token(got["expert_out"]), down)[0] <= TWO_PRODUCTS


# Types and layouts

BLOCKS = {"dim": 256, "ffn": 64, "shared_ffn": 64, "low_rank": 32}
FIRST = LayerCase("first types", n_tokens=9, **BLOCKS, types=MIXED_TYPES)  # type: ignore[arg-type]
OTHER = {part: name for part, name in OTHER_TYPES.items() if part != "ffn_gate_inp_shexp"}
SECOND = LayerCase("second types", n_tokens=9, **BLOCKS, types=OTHER)  # type: ignore[arg-type]


def test_each_tensor_is_read_by_its_own_type(device_name: str) -> None:
    window = window_of(device_name, FIRST, SECOND)
    parts = (part for case in (FIRST, SECOND) for part in ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"))
    assert len({(FIRST if i < 3 else SECOND).types[part] for i, part in enumerate(parts)}) == 6
    x = FIRST.x()
    first = assert_layer(window, FIRST.weights(0), x, 0)
    second = assert_layer(window, SECOND.weights(1), first, 1)
    assert_bitwise_equal(window.prompt_chunk(x), second, "both layers")


def test_unknown_type_is_refused_by_name() -> None:
    tensors = tensors_of([QUICK])
    name = "blk.0.ffn_up_exps.weight"
    tensors[name] = WeightArray("TQ1_0", tensors[name].shape, tensors[name].data)
    with pytest.raises(ValueError, match=rf"{name}.*expected .*got TQ1_0"):
        model_of(QUICK, tensors=tensors)


@pytest.mark.parametrize("part", ["ffn_gate_exps", "ffn_down_exps", "hc_ffn_down"])
def test_inner_size_that_no_quant_block_divides_is_refused(part: str) -> None:
    case = small_case("inner 588", dim=588, ffn=588)
    tensors = tensors_of([case])
    name = f"blk.0.{part}.weight"
    tensors[name] = WeightArray("Q4_K", tensors[name].shape, np.zeros(144 * 588, np.uint8))
    with pytest.raises(ValueError, match=rf"{name}.*expected .*256.*got"):
        model_of(case, tensors=tensors)


def test_every_layout_of_an_argument_is_read_right(device_name: str) -> None:
    window, c = window_of(device_name, QUICK, max_tokens=8), QUICK
    rng = np.random.default_rng(8)
    big = rng.standard_normal((8, 2 * c.dim)).astype(np.float32)
    ids = rng.integers(0, c.n_experts, (c.top_k, 16)).astype(np.int32)
    frozen = big[:, : c.dim].copy()
    frozen.flags.writeable = False
    for mixed in (big[:, ::2], big[::-1, : c.dim], np.asfortranarray(big[:, : c.dim]), big[:, : c.dim], frozen):
        want = window.shared(0, mixed.copy(order="C"))["shared_out"]
        assert_bitwise_equal(window.shared(0, mixed)["shared_out"], want, "shared_out")
    for chosen in (ids.T[::2], ids.T[7::-1], np.asfortranarray(ids.T[:8])):
        weights = rng.random(chosen.shape, np.float32)
        want = make_plan(chosen, weights, c.n_experts, SMALL_TILE[0])
        got = window.plan(chosen, np.asfortranarray(weights))
        assert_bitwise_equal(got["position"], want.position, "position")
        assert_bitwise_equal(got["row_weight"], want.row_weight, "row_weight")


def test_other_kinds_of_arguments_are_refused(device_name: str) -> None:
    window, c = window_of(device_name, QUICK), QUICK
    ids, weights = np.zeros((2, c.top_k), np.int32), np.ones((2, c.top_k), np.float32)
    mixed = np.ones((2, c.dim), np.float32)
    for wrong in (ids.astype(np.int64), ids.astype(">i4"), ids.astype(np.uint32), ids[0], np.int32(3), ids.tolist()):
        with pytest.raises(ValueError, match=r"^\[plan: ids\] expected int32 .*, got "):
            window.plan(wrong, weights)
    for wrong in (weights.astype(np.float64), weights.astype(">f4"), weights[:1], weights.T):
        with pytest.raises(ValueError, match=r"^\[plan: weights\] expected float32 .*, got "):
            window.plan(ids, wrong)
    for wrong in (mixed.astype(np.float16), mixed.astype(">f4"), mixed[:, 1:], mixed[0], np.float32(1)):
        with pytest.raises(ValueError, match=r"^\[route: mixed\] expected float32 .*, got "):
            window.route(0, wrong)
    with pytest.raises(ValueError, match=r"^\[gather: mixed_half\] expected float16 .*, got float32"):
        window.gather(window.plan(ids, weights), mixed)


# Sizes that nobody thought of


def any_case(seed: int) -> LayerCase:
    """Sizes and types drawn at random; each inner size a multiple of its tensors' quant blocks."""
    rng = np.random.default_rng(seed)

    def types_for(inner: int, parts: tuple[str, ...]) -> dict[str, str]:
        fitting = [name for name, info in TYPES.items() if inner % info.elements == 0]
        return {part: str(rng.choice(fitting)) for part in parts}

    dim, n_streams = int(rng.choice([20, 33, 64, 96, 256, 288])), int(rng.integers(1, 7))
    ffn, shared_ffn, rank = (int(rng.choice([1, 7, 32, 40, 64, 160])) for _ in range(3))
    n_experts = int(rng.integers(2, 40))
    types = types_for(dim, ("ffn_gate_exps", "ffn_up_exps", "ffn_gate_shexp", "ffn_up_shexp", "ffn_gate_inp"))
    types |= types_for(dim * n_streams, ("hc_ffn_down", "hc_ffn_inject")) | types_for(rank, ("hc_ffn_up",))
    types |= types_for(ffn, ("ffn_down_exps",)) | types_for(shared_ffn, ("ffn_down_shexp",))
    return LayerCase(
        f"seed {seed}", int(rng.integers(1, 40)), dim, n_experts, int(rng.integers(1, min(n_experts, 12))), ffn,
        shared_ffn, rank, n_streams, types, scales=bool(rng.integers(2)),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_any_sizes_and_types(device_name: str, seed: int) -> None:
    """What the layer adds, over the whole chunk: a token of few columns may sum to nearly nothing."""
    case = any_case(seed)
    window, weights, x = window_of(device_name, case), case.weights(), case.x()
    got = window.moe_layer(0, x)
    want = reference.layer(x, weights, "fp16", own_routing(window, x))["out_streams"]
    assert np.isfinite(got).all() and rel_l2(got.astype(np.float64) - x, want - x) <= EXACT_BOUND, case
