"""The engine against llama.cpp's tensors, and its behaviour as a library."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expertile
from expertile import _core
from expertile.measure import compare_ids, rel_l2
from expertile.synth import random_streams, synthetic_model

GOLDEN = Path(__file__).parent / "data" / "golden"
CASES = {"tiny": 2, "tiny/f32": 2, "wide-experts": 1}


def golden(case: str) -> tuple[Path, dict[str, np.ndarray]]:
    with np.load(GOLDEN / case / "golden.npz") as arrays:
        return GOLDEN / case / "model.gguf", dict(arrays)


@pytest.fixture(scope="module")
def window(request, device_name: str) -> expertile.Window:
    return expertile.Window.from_gguf(GOLDEN / "tiny" / "model.gguf", device_name, max_tokens=40)


def layer_out(window: expertile.Window, layer: int, x: np.ndarray) -> dict[str, np.ndarray]:
    """A layer step by step; `out` by writing it into zero streams with a gate of one (2 * sigmoid(0))."""
    read = window.hc_read(layer, x)
    routed = window.route(layer, read["mixed"])
    plan = window.plan(routed["ids"], routed["weights"])
    rows = window.gather(plan, read["mixed_half"])
    combined = window.combine(plan, window.experts(layer, plan, rows)["expert_out"])
    shared = window.shared(layer, read["mixed"])
    parts = (combined, shared["shared_out"], shared["shared_scalar"])
    out = window.hc_write(np.zeros_like(x), *parts, np.zeros_like(read["inject"]))[:, 0]
    streams = window.hc_write(x, *parts, read["inject"])
    return {**read, **routed, "routed": combined, "out": out, "out_streams": streams}


@pytest.mark.parametrize("case", CASES)
def test_meets_llama_cpp(case: str, device_name: str) -> None:
    path, arrays = golden(case)
    window = expertile.Window.from_gguf(path, device_name, max_tokens=arrays["tokens"].size)
    for layer in range(CASES[case]):
        want = {key.split("/")[1]: value for key, value in arrays.items() if key.startswith(f"layer{layer}/")}
        got = layer_out(window, layer, want["in_streams"])
        ids = compare_ids(got["ids"], want["ids"], want["logits"], 8e-3)
        print(f"{case} layer {layer} {device_name}: {ids.swaps} tokens with swapped near ties")
        assert ids.wrong == 0 and ids.swaps < 0.2 * len(want["ids"])
        same = (got["ids"] == want["ids"]).all(axis=1)
        for name, bound in {"mixed": 1e-3, "logits": 1e-3, "weights": 1e-3, "inject": 1e-3, "out": 1e-3}.items():
            error = rel_l2(got[name][same], want[name][same])
            print(f"  {name} {error:.2e}")
            assert error < bound, name
        assert rel_l2(got["out_streams"], want["out_streams"]) < 1e-3


@pytest.mark.parametrize("case", CASES)
def test_layer_equals_its_steps(case: str, device_name: str) -> None:
    path, arrays = golden(case)
    window = expertile.Window.from_gguf(path, device_name, max_tokens=arrays["tokens"].size)
    x = arrays["layer0/in_streams"]
    np.testing.assert_array_equal(window.moe_layer(0, x), layer_out(window, 0, x)["out_streams"])


@pytest.mark.parametrize("fuse", [[], ["swiglu"], ["gatherless"], ["combine"], ["swiglu", "combine"]])
@pytest.mark.parametrize("case", CASES)
def test_fusion_does_not_change_a_bit(case: str, device_name: str, fuse: list[str]) -> None:
    path, arrays = golden(case)
    window = expertile.Window.from_gguf(path, device_name, arrays["tokens"].size, fuse=fuse)
    kernels = [launch["kernel"] for group in window.program(0, 5)["groups"] for launch in group["launches"]]
    assert any(kernel.startswith("moe_out_combine") for kernel in kernels) == ("combine" in fuse)
    if case != "tiny/f32":  # fused kernels exist for quantized experts
        assert any("grouped_swiglu" in kernel for kernel in kernels) == ("swiglu" in fuse)
        assert ("mm_gather_h" not in kernels) == ("gatherless" in fuse)
    assert window.program(0, 5)["faults"] == []
    x = arrays["layer0/in_streams"]
    plain = expertile.Window.from_gguf(path, device_name, arrays["tokens"].size, fuse=[])
    np.testing.assert_array_equal(window.moe_layer(0, x), plain.moe_layer(0, x))


@pytest.mark.parametrize("fuse", [[], ["combine"]])
@pytest.mark.parametrize("case", CASES)
def test_four_columns_a_thread_do_not_change_a_bit(case: str, device_name: str, fuse: list[str]) -> None:
    path, arrays = golden(case)
    x, results = arrays["layer0/in_streams"], []
    for elementwise in ("scalar", "vector"):
        window = expertile.Window.from_gguf(path, device_name, len(x), fuse=fuse, elementwise=elementwise)
        launches = [launch for group in window.program(0, 5)["groups"] for launch in group["launches"]]
        forms = {launch["kernel"] for launch in launches if launch["kernel"].endswith("_v4")}
        last = {"moe_out_combine_v4"} if fuse else {"mm_combine_v4", "moe_out_v4"}
        assert forms == ({"gr_epi_down_v4", "swiglu_h_v4", "act_f16_v4", *last} if elementwise == "vector" else set())
        assert window.program(0, 5)["faults"] == []
        results.append(window.moe_layer(0, x))
    np.testing.assert_array_equal(results[1], results[0])
    with pytest.raises(ValueError, match="scalar or vector, got both"):
        expertile.Window.from_gguf(path, device_name, len(x), elementwise="both")


def test_fusions_that_cannot_be_are_refused(device_name: str) -> None:
    for fuse, message in ([["swiglu", "gatherless"], "swiglu or gatherless, got both"], [["gemm"], "got gemm"]):
        with pytest.raises(ValueError, match=message):
            expertile.Window.from_gguf(GOLDEN / "tiny" / "model.gguf", device_name, 40, fuse=fuse)


def test_prompt_chunk_runs_every_layer_and_the_token_mixer(window: expertile.Window) -> None:
    _, arrays = golden("tiny")
    x = arrays["layer0/in_streams"]
    seen = []

    def mixer(layer: int, streams: np.ndarray) -> None:
        assert streams.shape == x.shape and streams.flags.writeable
        seen.append(layer)
        if layer == 1:  # what llama.cpp's attention made of it
            streams[:] = arrays["layer1/in_streams"]

    out = window.prompt_chunk(x, token_mixer=mixer)
    assert seen == [0, 1]
    assert rel_l2(out, arrays["layer1/out_streams"]) < 1e-3


def test_a_token_does_not_depend_on_its_neighbours(window: expertile.Window) -> None:
    _, arrays = golden("tiny")
    x = arrays["layer0/in_streams"]
    together = window.prompt_chunk(x)
    for token in (0, 17, 32):
        np.testing.assert_array_equal(window.prompt_chunk(x[token : token + 1])[0], together[token])
    np.testing.assert_array_equal(np.concatenate([window.prompt_chunk(x[:20]), window.prompt_chunk(x[20:])]), together)


def test_bits_do_not_change_from_run_to_run(window: expertile.Window) -> None:
    _, arrays = golden("tiny")
    first = window.prompt_chunk(arrays["layer0/in_streams"])
    for _ in range(9):
        np.testing.assert_array_equal(window.prompt_chunk(arrays["layer0/in_streams"]), first)


def test_no_tokens_is_no_work(window: expertile.Window) -> None:
    c = window.config
    x = np.zeros((0, c.n_streams, c.dim), np.float32)
    assert window.prompt_chunk(x).shape == x.shape
    plan = window.plan(np.zeros((0, c.top_k), np.int32), np.zeros((0, c.top_k), np.float32))
    assert plan["meta"][:5].tolist() == [0] * 5 and plan["meta"][5:].tolist() == [1] * 9


def test_wrong_input_is_refused_and_nothing_is_lost(window: expertile.Window) -> None:
    c = window.config
    good = np.ones((3, c.n_streams, c.dim), np.float32)
    before = window.prompt_chunk(good)
    wrong = [
        good.astype(np.float64),
        good.astype(">f4"),
        good[0],
        good[:, :2],
        np.ones((41, c.n_streams, c.dim), np.float32),
        np.float32(1.0),
        None,
    ]
    for x in wrong:
        with pytest.raises(ValueError, match=r"^\[prompt_chunk\] expected .*, got "):
            window.prompt_chunk(x)
    for out, error in [(np.empty(good.shape, np.float64), TypeError), ([], TypeError), (good[:2].copy(), ValueError)]:
        with pytest.raises(error, match=r"^\[prompt_chunk: out\] expected "):
            window.prompt_chunk(good, out=out)
    with pytest.raises(ValueError, match=r"^\[moe_layer: layer\] expected 0\.\.1, got 2"):
        window.moe_layer(2, good)
    with pytest.raises(ValueError, match=r"^\[plan: ids\[0, 1\]\] expected -1\.\.15, got 16"):
        window.plan(np.array([[0, 16, 1, 2]], np.int32), np.ones((1, 4), np.float32))
    with pytest.raises(ValueError, match=r"^\[plan: ids\] expected int32"):
        window.plan(np.zeros((1, 4), np.int64), np.ones((1, 4), np.float32))
    np.testing.assert_array_equal(window.prompt_chunk(good), before)


def small_plan(window: expertile.Window) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """A plan of three tokens with one entry skipped, and their rows."""
    ids = np.array([[0, 3, 5, 7], [-1, 0, 3, 9], [9, 8, 0, 1]], np.int32)
    plan = window.plan(ids, np.full(ids.shape, 0.25, np.float32))
    return plan, window.gather(plan, np.ones((3, window.config.dim), np.float16))


@pytest.mark.parametrize(
    ("name", "at", "value"),
    [
        ("meta", 0, 0),
        ("meta", 0, 1 << 31),
        ("meta", 1, 1 << 31),
        ("tiles", (0, 0), 16),
        ("tiles", (1, 1), 1 << 31),
        ("tiles", (1, 1), 0),
        ("tiles", (0, 2), 0),
        ("tiles", (0, 2), 17),
        ("row_token", 0, 3),
        ("row_token", 0, -2),
        ("position", 0, 1 << 30),
        ("position", 0, -2),
    ],
)
def test_a_plan_that_points_outside_its_buffers_is_refused(
    window: expertile.Window, name: str, at: Any, value: int
) -> None:
    """The kernels follow a plan's numbers into memory."""
    plan, rows = small_plan(window)
    wrong = plan | {name: plan[name].copy()}
    wrong[name][at] = value
    out = np.zeros((len(rows), window.config.dim), np.float32)
    steps = {
        "gather": lambda: window.gather(wrong, np.ones((3, window.config.dim), np.float16)),
        "experts": lambda: window.experts(0, wrong, rows),
        "combine": lambda: window.combine(wrong, out),
    }
    for step, run in steps.items():
        with pytest.raises(ValueError, match=rf"^\[{step}: {name}.*\] expected .*, got "):
            run()


def test_a_plan_of_other_arrays_is_refused(window: expertile.Window) -> None:
    plan, rows = small_plan(window)
    for name in ("tiles", "row_token", "row_weight", "position", "meta"):
        for other in (plan[name].astype(np.int64), plan[name].astype(plan[name].dtype.newbyteorder()), plan[name][1:]):
            with pytest.raises(ValueError, match=rf"^\[experts: (meta|position|{name})\] expected .*, got "):
                window.experts(0, plan | {name: other}, rows)
        with pytest.raises(ValueError, match=r"^\[experts: plan\] expected tiles, row_token, .*, got "):
            window.experts(0, {key: value for key, value in plan.items() if key != name}, rows)


@pytest.mark.parametrize("ffn", [[64, 320], [320, 64]])
def test_one_plan_serves_layers_of_other_expert_sizes(device_name: str, ffn: list[int]) -> None:
    """A plan made by itself has the grids of layer 0: those of the layer that reads it count."""
    model = expertile.Model.from_tensors(*synthetic_model("tiny", 2, expert_ffn=ffn))
    window = expertile.Window(model, device_name, max_tokens=8)
    x = random_streams(8, 4, 512)
    for layer in (0, 1):
        np.testing.assert_array_equal(layer_out(window, layer, x)["out_streams"], window.moe_layer(layer, x))


def test_every_memory_layout_is_read_right(window: expertile.Window) -> None:
    rng = np.random.default_rng(0)
    c = window.config
    big = rng.standard_normal((8, c.n_streams, 2 * c.dim)).astype(np.float32)
    for x in (big[:, :, ::2], big[::-1, :, : c.dim], np.asfortranarray(big[:, :, : c.dim])):
        np.testing.assert_array_equal(window.prompt_chunk(x), window.prompt_chunk(x.copy(order="C")))
    frozen = np.ascontiguousarray(big[:, :, : c.dim])
    frozen.flags.writeable = False
    window.prompt_chunk(frozen)


def test_a_token_without_finite_logits_is_reported_and_the_others_unharmed(window: expertile.Window) -> None:
    rng = np.random.default_rng(1)
    c = window.config
    x = rng.standard_normal((5, c.n_streams, c.dim)).astype(np.float32)
    want = window.prompt_chunk(x)
    x[2, 0, 0] = np.nan
    out = np.empty_like(x)
    with pytest.raises(expertile.RouteError, match=r"layer 0, token 2"):
        window.prompt_chunk(x, out=out)
    assert np.isnan(out[2]).all()
    np.testing.assert_array_equal(np.delete(out, 2, 0), np.delete(want, 2, 0))
    x[2] = 1.0
    assert np.isfinite(window.prompt_chunk(x)).all()


def test_an_exception_in_the_token_mixer_leaves_the_window_usable(window: expertile.Window) -> None:
    x = np.ones((2, window.config.n_streams, window.config.dim), np.float32)

    def mixer(layer: int, streams: np.ndarray) -> None:
        raise KeyError("from the server")

    with pytest.raises(KeyError):
        window.prompt_chunk(x, token_mixer=mixer)
    assert np.isfinite(window.prompt_chunk(x)).all()


def test_a_call_from_inside_a_callback_is_refused(window: expertile.Window) -> None:
    """It would overwrite the streams of the call that runs, and that call's result would be wrong without a word."""
    x = np.ones((2, window.config.n_streams, window.config.dim), np.float32)
    want = window.prompt_chunk(x)
    inner = [
        lambda: window.moe_layer(0, x),
        lambda: window.hc_read(0, x),
        lambda: window.route(0, x[:, 0]),
        lambda: window.plan(np.zeros((1, 4), np.int32), np.ones((1, 4), np.float32)),
    ]
    for call in inner:
        for where in ("token_mixer", "progress"):
            with pytest.raises(ValueError, match=r"^\[\w+\] expected a call from outside this window's token_mixer"):
                window.prompt_chunk(x, **{where: lambda *_, call=call: call()})
    seen: list[Any] = []
    window.prompt_chunk(x, progress=lambda *_: seen.append((window.seconds, window.memory(), window.saturated)))
    assert len(seen) == window.config.n_layers
    np.testing.assert_array_equal(window.prompt_chunk(x), want)


def test_two_threads_may_call_one_window(window: expertile.Window) -> None:
    rng = np.random.default_rng(2)
    c = window.config
    inputs = [rng.standard_normal((7, c.n_streams, c.dim)).astype(np.float32) for _ in range(4)]
    want = [window.prompt_chunk(x) for x in inputs]
    got: list[np.ndarray | None] = [None] * 4

    def work(i: int) -> None:
        got[i] = window.prompt_chunk(inputs[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_calls_wait_for_callbacks_that_return(window: expertile.Window) -> None:
    x = np.ones((2, window.config.n_streams, window.config.dim), np.float32)
    want = window.prompt_chunk(x)
    results: list[bool] = []

    def work() -> None:
        got = window.prompt_chunk(x, token_mixer=lambda *_: time.sleep(0.05))
        results.append(bool((got == want).all()))

    threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert results == [True] * 3


def test_windows_on_one_device_run_from_any_threads(device: Any) -> None:
    model = expertile.open_gguf(GOLDEN / "tiny" / "model.gguf")
    x = random_streams(9, model.config.n_streams, model.config.dim)
    windows = [expertile.Window(model, device, max_tokens=9) for _ in range(3)]
    want = windows[0].moe_layer(0, x)
    wrong: list[str] = []

    def work(window: expertile.Window) -> None:
        try:
            for _ in range(10):
                if (window.moe_layer(0, x) != want).any():
                    wrong.append("other bits")
        except RuntimeError as error:
            wrong.append(str(error))

    threads = [threading.Thread(target=work, args=(window,)) for window in windows]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_threads_do_not_change_a_bit(device_name: str) -> None:
    path, arrays = golden("tiny")
    results = [
        expertile.Window.from_gguf(path, device_name, 40, threads=n).prompt_chunk(arrays["layer0/in_streams"])
        for n in (1, 2, 3)
    ]
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


@pytest.mark.parametrize("plan", _core.plan_variants())
@pytest.mark.parametrize("tile", [t for t in _core.tiles() if tuple(t) != (16, 64, 32, 2)])
def test_plan_and_tile_do_not_change_a_bit(device_name: str, plan: str, tile: list[int]) -> None:
    path, arrays = golden("tiny")
    x = arrays["layer0/in_streams"]
    usual = expertile.Window.from_gguf(path, device_name, 40).moe_layer(0, x)
    other = expertile.Window.from_gguf(path, device_name, 40, plan=plan, gate_up=tuple(tile), down=tuple(tile))
    np.testing.assert_array_equal(other.moe_layer(0, x), usual)


def test_a_tile_that_is_not_compiled_is_refused_with_the_list() -> None:
    with pytest.raises(ValueError, match=r"16_32_32_4, 16_64_32_2, 32_64_32_4, 64_64_32_4, got 8_64_32_4"):
        expertile.Window.from_gguf(GOLDEN / "tiny" / "model.gguf", "cpu", gate_up=(8, 64, 32, 4))
    with pytest.raises(ValueError, match=r"the rows of the gate_up tile"):
        expertile.Window.from_gguf(GOLDEN / "tiny" / "model.gguf", "cpu", gate_up=(32, 64, 32, 4))


def test_schedule_is_checked_and_planted_faults_are_named(window: expertile.Window) -> None:
    program = window.program(0, 33)
    assert program["faults"] == []
    numbers, count = [], 0
    for group in program["groups"]:
        numbers.append(list(range(count, count + len(group["launches"]))))
        count += len(group["launches"])
    assert window.check_groups(0, 33, numbers) == []
    for i in range(len(numbers) - 1):  # every barrier is needed: without it there is a hazard
        merged = [*numbers[:i], numbers[i] + numbers[i + 1], *numbers[i + 2 :]]
        assert any(fault["kind"] == "hazard" for fault in window.check_groups(0, 33, merged)), program["groups"][i]
    wide = next(i for i, group in enumerate(numbers) if len(group) > 1)
    split = [*numbers[:wide], numbers[wide][:1], numbers[wide][1:], *numbers[wide + 1 :]]
    faults = window.check_groups(0, 33, split)
    assert faults and {fault["kind"] for fault in faults} == {"barrier"}
    late = [*numbers[1:], numbers[0]]
    assert any(fault["kind"] == "unwritten" for fault in window.check_groups(0, 33, late))


def test_golden_files_are_the_ones_described() -> None:
    import hashlib

    for case in CASES:
        described = json.loads((GOLDEN / case / "meta.json").read_text())["files"]
        for name, facts in described.items():
            assert hashlib.sha256((GOLDEN / case / name).read_bytes()).hexdigest() == facts["sha256"]
