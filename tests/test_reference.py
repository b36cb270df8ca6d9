"""The numpy reference against captured arrays, a second implementation, and deliberately wrong ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cases import LAYER_CASES, LayerCase
from golden_model import read_golden
from naive_layer import WRONG_VARIANTS, naive_layer

from expertile import reference
from expertile.layer_weights import LayerWeights, WeightArray, example_weights
from expertile.measure import assert_bitwise_equal, rel_l2, worst_token_rel_l2
from expertile.plan import make_plan

GOLDEN_LAYERS = [("tiny", 0), ("tiny", 1), ("tiny/f32", 0), ("tiny/f32", 1), ("wide-experts", 0)]
QUANTITIES = ("mixed", "inject", "logits", "weights", "routed", "shared_gate", "shared", "out", "out_streams")
CASES = {case.name: case for case in LAYER_CASES}


@pytest.fixture(scope="module", params=GOLDEN_LAYERS, ids=lambda pair: f"{pair[0]}-layer{pair[1]}")
def golden(request: pytest.FixtureRequest, golden_folder: Path):
    """(captured arrays by name, the layer's weights)"""
    name, layer = request.param
    prefix = f"layer{layer}/"
    with np.load(golden_folder / name / "golden.npz") as arrays:
        captured = {key.removeprefix(prefix): arrays[key] for key in arrays.files if key.startswith(prefix)}
    return captured, read_golden(golden_folder / name / "model.gguf").layer(layer)


def test_exact_reference_matches_captured_arrays(golden) -> None:
    captured, weights = golden
    got = reference.layer(captured["in_streams"], weights)
    np.testing.assert_array_equal(got["ids"], captured["ids"])
    assert got["faults"] == [] and got["saturated"] == 0
    distances = {name: rel_l2(got[name], captured[name]) for name in QUANTITIES}
    print("\n" + "  ".join(f"{name} {value:.1e}" for name, value in distances.items()))
    assert all(np.abs(captured[name]).max() > 0 for name in QUANTITIES)
    assert max(distances.values()) < 1e-5, distances


def test_steps_match_captured_arrays_when_fed_with_them(golden) -> None:
    captured, weights = golden
    read = reference.hc_read(captured["in_streams"], weights)
    assert rel_l2(read["mixed"], captured["mixed"]) < 1e-5
    routed = reference.route(captured["mixed"], weights)
    np.testing.assert_array_equal(routed["ids"], captured["ids"])
    down = reference.experts(captured["mixed"], captured["ids"], weights)["down"]
    assert rel_l2(reference.combine(captured["ids"], captured["weights"], down), captured["routed"]) < 1e-5
    assert rel_l2(reference.shared(captured["mixed"], weights)["shared"], captured["shared"]) < 1e-5
    written = reference.hc_write(captured["in_streams"], captured["inject"], captured["out"])
    assert rel_l2(written, captured["out_streams"]) < 1e-5


def test_half_operands_move_the_result_by_their_rounding_only(golden) -> None:
    captured, weights = golden
    got = reference.layer(captured["in_streams"], weights, "fp16")
    np.testing.assert_array_equal(got["ids"], captured["ids"])
    distance = rel_l2(got["out"], captured["out"])
    worst, token = worst_token_rel_l2(got["out"], captured["out"])
    print(f"\nout {distance:.2e}, worst token {worst:.2e} (token {token})")
    assert 1e-4 < distance < 1e-3


def test_golden_reader_equals_gguf_reader(golden_folder: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = golden_folder / "tiny" / "model.gguf"
    ours, reader = read_golden(path), gguf.GGUFReader(path)
    assert len(ours.tensors) == len(reader.tensors) > 0
    for tensor in reader.tensors:
        mine = ours.tensors[tensor.name]
        assert (mine.type, mine.shape) == (tensor.tensor_type.name, tuple(int(n) for n in tensor.shape))
        np.testing.assert_array_equal(mine.data, np.ascontiguousarray(tensor.data).view(np.uint8).reshape(-1))


@pytest.mark.parametrize("case", LAYER_CASES, ids=lambda case: case.name)
def test_reference_equals_second_implementation(case: LayerCase) -> None:
    weights, x = case.weights(), case.x()[:5]
    got, want = reference.layer(x, weights), naive_layer(x, weights)
    assert np.abs(want["out"]).max() > 0
    assert rel_l2(got["out"], want["out"]) < 1e-12
    assert rel_l2(got["out_streams"], want["out_streams"]) < 1e-12


@pytest.mark.parametrize("wrong", WRONG_VARIANTS)
def test_wrong_variant_is_seen(wrong: str, golden_folder: Path) -> None:
    if "eps" in wrong:
        # Streams so small that eps matters.
        weights, x = CASES["plain"].weights(), CASES["plain"].x() * 1e-3
        want = reference.layer(x, weights)
    elif "ties" in wrong:
        weights, x = CASES["tied logits"].weights(), CASES["tied logits"].x()
        want = reference.layer(x, weights)
    else:
        weights = read_golden(golden_folder / "tiny" / "f32" / "model.gguf").layer(1)
        with np.load(golden_folder / "tiny" / "f32" / "golden.npz") as arrays:
            x = arrays["layer1/in_streams"]
            want = {name: arrays[f"layer1/{name}"] for name in ("out", "out_streams")}
    right, moved = (
        max(rel_l2(got[name], want[name]) for name in ("out", "out_streams"))
        for got in (naive_layer(x, weights), naive_layer(x, weights, wrong))
    )
    print(f"\n{wrong}: {moved:.2e} (right: {right:.1e})")
    assert right < 1e-5 and moved > 1e-2


def test_unknown_operands_are_refused() -> None:
    with pytest.raises(ValueError, match="expected operands"):
        reference.product([[1.0]], np.ones((1, 1)), "fp8")  # type: ignore[arg-type]


def test_to_half_rounds_saturates_and_counts() -> None:
    values = np.array([65504.0, 65519.9, 65520.0, -1e9, np.inf, np.nan, 1 + 2**-11, 1 + 3 * 2**-11, 2.0**-25])
    halves, count = reference.to_half(values)
    want = np.float16([65504, 65504, 65504, -65504, 65504, np.nan, 1, 1 + 2**-9, 0])
    assert_bitwise_equal(halves, want, "halves")
    assert count == 4


def test_product_over_the_half_limit_saturates_and_is_counted() -> None:
    case = CASES["product over the half limit"]
    got = reference.layer(case.x(), case.weights(), "fp16")
    exceeding = int(np.count_nonzero(np.abs(got["act"].astype(np.float32)) > 65504))
    assert got["saturated"] == exceeding > 0
    assert np.isfinite(got["out_streams"]).all()
    assert reference.layer(case.x(), case.weights(), "exact")["saturated"] == 0


def test_f32_router_keeps_fp32_operands_and_f16_router_does_not() -> None:
    case = CASES["plain"]
    weights = case.weights()
    mixed = reference.hc_read(case.x(), weights)["mixed"]
    np.testing.assert_array_equal(
        reference.route(mixed, weights, "fp16")["logits"], reference.route(mixed, weights)["logits"]
    )
    other = CASES["other types"]
    mixed = reference.hc_read(other.x(), other.weights())["mixed"]
    exact, half = (reference.route(mixed, other.weights(), mode)["logits"] for mode in ("exact", "fp16"))
    assert 1e-5 < rel_l2(half, exact) < 1e-3


def test_fused_gate_up_equals_two_tensors() -> None:
    case = CASES["fused gate and up"]
    fused = case.weights()
    tensors = dict(fused.tensors)
    both = tensors.pop("blk.0.ffn_gate_up_exps.weight")
    rows = both.data.view(np.float32).reshape(case.n_experts, 2 * case.ffn, case.dim)
    tensors["blk.0.ffn_gate_exps.weight"] = WeightArray.from_values(rows[:, : case.ffn])
    tensors["blk.0.ffn_up_exps.weight"] = WeightArray.from_values(rows[:, case.ffn :])
    apart = LayerWeights(tensors, 0, case.top_k)
    got, want = (reference.layer(case.x(), w)["out"] for w in (fused, apart))
    np.testing.assert_array_equal(got, want)


def test_skipped_entries_equal_entries_of_weight_zero() -> None:
    case = CASES["wide"]
    weights, x = case.weights(), case.x()
    full = reference.layer(x, weights)
    ids, route_weights = full["ids"].copy(), full["weights"].copy()
    ids.reshape(-1)[::3] = -1
    route_weights.reshape(-1)[::3] = 0.0
    skipped = reference.layer(x, weights, routing=(ids, full["weights"]))
    zeroed = reference.layer(x, weights, routing=(full["ids"], route_weights))
    assert rel_l2(skipped["routed"], zeroed["routed"]) < 1e-14
    assert rel_l2(skipped["routed"], full["routed"]) > 1e-2


def test_no_tokens_and_all_skipped() -> None:
    weights = CASES["plain"].weights()
    assert reference.layer(np.zeros((0, 4, 64)), weights)["out_streams"].shape == (0, 4, 64)
    x = CASES["plain"].x()[:2]
    got = reference.layer(x, weights, routing=(np.full((2, 2), -1), np.ones((2, 2))))
    assert not got["routed"].any()
    np.testing.assert_array_equal(got["out"], got["shared"])


def test_ids_outside_the_experts_are_refused() -> None:
    for bad in (4, -2):
        with pytest.raises(ValueError, match=r"expected ids in -1\.\.3"):
            reference.experts(np.ones((1, 8)), [[0, bad]], example_weights())


@pytest.mark.parametrize(
    ("logits", "ids", "fault"),
    [
        ([1, 3, 3, 3], [1, 2], False),
        ([0.0, -0.0, -1, 0.0], [0, 1], False),
        ([np.nan, -np.inf, 2, 1], [2, 3], False),
        ([1 + 1e-9, 1 + 2e-9, 0, 0], [0, 1], False),
        ([np.inf, 1, 2, 3], [-1, -1], True),
        ([np.nan, np.nan, -np.inf, 3], [-1, -1], True),
        ([1e39, 1, 2, 3], [-1, -1], True),
    ],
)
def test_route_topk_rules(logits: list[float], ids: list[int], fault: bool) -> None:
    # A neighbour that is in order is unharmed.
    got, weights, faults = reference.route_topk([logits, [4, 3, 2, 1]], 2)
    assert got.tolist() == [ids, [0, 1]] and faults == ([0] if fault else [])
    assert weights[0].sum() == pytest.approx(0.0 if fault else 1.0)
    assert weights[1].tolist() == pytest.approx([1 / (1 + np.exp(-1)), 1 / (1 + np.exp(1))])


def test_gather_and_combine_fp32_in_slot_order() -> None:
    rng = np.random.default_rng(3)
    y, weight = rng.standard_normal((40, 9), dtype=np.float32), rng.random(40, dtype=np.float32)
    position = rng.permutation(40).astype(np.int32).reshape(8, 5)
    position[2, 1] = position[3, 0] = -1
    position[4] = -1
    want = np.zeros((8, 9), dtype=np.float32)
    for t, d in np.ndindex(8, 9):
        acc = np.float32(0)
        for row in position[t]:
            if row >= 0:
                acc = np.float32(acc + np.float32(weight[row] * y[row, d]))
        want[t, d] = acc
    assert_bitwise_equal(reference.combine_fp32(position, weight, y), want, "combine")
    backwards = reference.combine_fp32(position[:, ::-1], weight, y)
    assert np.any(backwards != want)
    with pytest.raises(ValueError, match="expected float32"):
        reference.combine_fp32(position, weight.astype(np.float64), y)
    with pytest.raises(ValueError, match=r"expected position \(T, K\), got \(40,\)"):
        reference.combine_fp32(position.reshape(-1), weight, y)
    rows = reference.gather(y.astype(np.float16), [39, -1, 0])
    assert (
        rows.dtype == np.float16 and not rows[1].any() and np.array_equal(rows[[0, 2]], y[[39, 0]].astype(np.float16))
    )


def test_rows_of_a_plan_combine_to_the_routed_sum() -> None:
    case = CASES["wide"]
    weights = case.weights()
    full = reference.layer(case.x(), weights)
    ids = full["ids"].copy()
    ids.reshape(-1)[::7] = -1
    plan = make_plan(ids, full["weights"].astype(np.float32), case.n_experts, 16)
    rows = reference.gather(full["mixed"], plan.row_token)
    y = np.zeros(rows.shape, dtype=np.float32)
    for expert, first, count, _ in plan.tiles.tolist():
        one = reference.experts(rows[first : first + count], np.full((count, 1), expert), weights)
        y[first : first + count] = one["down"][:, 0]
    want = reference.layer(case.x(), weights, routing=(ids, full["weights"]))["routed"]
    assert rel_l2(reference.combine_fp32(plan.position.reshape(ids.shape), plan.row_weight, y), want) < 1e-6


def test_skipped_entry_never_spreads_nan() -> None:
    y = np.array([[np.nan], [2.0]], dtype=np.float32)
    assert reference.combine_fp32([[-1, 1]], np.ones(2, np.float32), y).tolist() == [[2.0]]
    assert reference.combine([[-1, 1]], [[0.5, 1.0]], y[None]).tolist() == [[2.0]]


def test_prompt_is_layer_after_layer() -> None:
    case = CASES["plain"]
    layers = [case.weights(0), case.weights(1)]
    first = reference.layer(case.x(), layers[0])["out_streams"]
    want = reference.layer(first, layers[1])["out_streams"]
    np.testing.assert_array_equal(reference.prompt(case.x(), iter(layers)), want)
    assert rel_l2(first, want) > 1e-2


def test_missing_tensor_and_wrong_shapes_are_named() -> None:
    weights = example_weights()
    tensors = {name: tensor for name, tensor in weights.tensors.items() if "hc_ffn_up" not in name}
    with pytest.raises(ValueError, match=r"blk\.0\.hc_ffn_up\.weight"):
        reference.layer(np.ones((1, 2, 8)), LayerWeights(tensors, 0, 2))
    with pytest.raises(ValueError, match=r"\[hc_read\] expected shape \(T, 2, 8\), got \(2, 8\)"):
        reference.hc_read(np.ones((2, 8)), weights)
    with pytest.raises(ValueError, match=r"expected an expert in 0\.\.3, got 4"):
        weights.expert("up", 4)
