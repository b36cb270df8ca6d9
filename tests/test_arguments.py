"""Whole numbers that a caller hands in: of any kind, within what they may be, or a ValueError in the usual words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import expertile
from expertile.synth import random_streams, synthetic_model


@pytest.fixture(scope="module")
def model() -> expertile.Model:
    return expertile.Model.from_tensors(*synthetic_model("tiny", 2))


@pytest.fixture(scope="module")
def window(model: expertile.Model) -> expertile.Window:
    return expertile.Window(model, "cpu", max_tokens=4)


WRONG: list[Any] = [-1, 1 << 33, 1 << 70, 0.5, "1", None, True, np.float32(1)]


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_another_number_is_refused_in_the_usual_words(
    model: expertile.Model, window: expertile.Window, wrong: Any
) -> None:
    sizes, tensors = synthetic_model("tiny", 2)
    x = random_streams(2, 4, 512)
    calls: dict[str, Callable[[], Any]] = {
        "open_device: threads": lambda: expertile.open_device("cpu", threads=wrong),
        "Window: max_tokens": lambda: expertile.Window(model, "cpu", max_tokens=wrong),
        "Window: gate_up": lambda: expertile.Window(model, "cpu", 4, gate_up=(16, wrong, 32, 2)),
        "Window: down": lambda: expertile.Window(model, "cpu", 4, down=(16, 64, 32, wrong)),
        "moe_layer: layer": lambda: window.moe_layer(wrong, x),
        "hc_read: layer": lambda: window.hc_read(wrong, x),
        "program: layer": lambda: window.program(wrong, 2),
        "program: n_tokens": lambda: window.program(0, wrong),
        "Model: dim": lambda: expertile.Model.from_tensors({**sizes, "dim": wrong}, tensors),
        "Model: n_layers": lambda: expertile.Model.from_tensors({**sizes, "n_layers": wrong}, tensors),
        "Model: expert_ffn": lambda: expertile.Model.from_tensors({**sizes, "expert_ffn": [64, wrong]}, tensors),
    }
    for where, call in calls.items():
        with pytest.raises(ValueError, match=rf"^\[{where}\] expected .*, got "):
            call()


def test_a_size_too_many_or_too_few_is_refused() -> None:
    sizes, tensors = synthetic_model("tiny")
    for wrong in ({}, {**sizes, "more": 1}, {key: value for key, value in sizes.items() if key != "expert_ffn"}):
        with pytest.raises(ValueError, match=r"^\[Model: sizes\] expected n_layers, .*, got "):
            expertile.Model.from_tensors(wrong, tensors)


@pytest.mark.parametrize("tile", [None, 16, "16,64,32,2", (16, 64, 32), (16, 64, 32, 2, 1)], ids=repr)
def test_what_is_no_tile_is_refused(model: expertile.Model, tile: Any) -> None:
    with pytest.raises(ValueError, match=r"^\[Window: gate_up\] expected a tile \(M, N, K, S\), got "):
        expertile.Window(model, "cpu", 4, gate_up=tile)


def test_numpys_whole_numbers_are_whole_numbers(model: expertile.Model) -> None:
    sizes, tensors = synthetic_model("tiny")
    counted = {name: np.int64(sizes[name]) for name in sizes if name not in ("expert_ffn", "rms_eps")}
    same = expertile.Model.from_tensors({**sizes, **counted, "expert_ffn": np.array(sizes["expert_ffn"])}, tensors)
    window = expertile.Window(same, expertile.open_device("cpu", threads=np.int32(1)), max_tokens=np.uint16(4))
    assert window.moe_layer(np.int8(0), random_streams(2, 4, 512)).shape == (2, 4, 512)
