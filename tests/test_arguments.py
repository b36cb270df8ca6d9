"""Whole numbers that a caller hands in: of any kind, within what they may be, or a ValueError in the usual words."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expertile
from expertile.layer_weights import WeightArray
from expertile.synth import random_streams, synthetic_model


@pytest.fixture(scope="module")
def model() -> expertile.Model:
    return expertile.Model.from_tensors(*synthetic_model("tiny", 2))


@pytest.fixture(scope="module")
def window(model: expertile.Model) -> expertile.Window:
    return expertile.Window(model, "cpu", max_tokens=4)


@pytest.fixture(scope="module")
def device() -> expertile.Device:
    return expertile.open_device("cpu", threads=1)


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
        "check_groups: n_tokens": lambda: window.check_groups(0, wrong, []),
        "check_groups: groups": lambda: window.check_groups(0, 2, [[wrong]]),
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


@pytest.mark.parametrize("wrong", [w for w in WRONG if w != 1 << 33], ids=repr)
def test_a_device_refuses_what_is_no_whole_number(device: expertile.Device, wrong: Any) -> None:
    buffer, array = device.alloc(np.int64(8)), np.zeros(2, np.float32)
    calls: dict[str, Callable[[], Any]] = {
        "Device.alloc: bytes": lambda: device.alloc(wrong),
        "Device.write: offset": lambda: device.write(buffer, array, wrong),
        "Device.adopt: address": lambda: device.adopt(wrong, 8),
        "Device.adopt: bytes": lambda: device.adopt(array.ctypes.data, wrong),
        "Device.copy: bytes": lambda: device.copy(buffer, device.alloc(8), wrong),
    }
    for where, call in calls.items():
        with pytest.raises(ValueError, match=rf"^\[{where}\] expected 0\.\.2\^64-1, got .*$"):
            call()


@pytest.mark.parametrize(("address", "size"), [(2**64 - 4, 8), (2, 2**64 - 1), (2**63, 2**63 + 1)])
@pytest.mark.parametrize("kind", ["cpu", "emulator"])
def test_memory_past_the_last_address_is_refused(kind: str, address: int, size: int) -> None:
    with pytest.raises(ValueError, match=rf"^\[{kind} adopt\] expected an address .*, got {size} bytes at {address}$"):
        expertile.open_device(kind, threads=1).adopt(address, size)


OBJECTS: list[Any] = [None, 5, "text", b"bytes", [1, 2], 0.5, object()]


@pytest.mark.parametrize("wrong", OBJECTS, ids=repr)
def test_a_device_refuses_what_is_no_array_and_no_buffer(device: expertile.Device, wrong: Any) -> None:
    buffer, array = device.alloc(8), np.zeros(2, np.float32)
    calls: dict[str, Callable[[], Any]] = {
        "Device.upload: array": lambda: device.upload(wrong),
        "Device.read: source": lambda: device.read(wrong, array),
        "Device.read: array": lambda: device.read(buffer, wrong),
        "Device.write: to": lambda: device.write(wrong, array),
        "Device.write: array": lambda: device.write(buffer, array=wrong),
        "Device.copy: to": lambda: device.copy(wrong, buffer, 8),
        "Device.copy: source": lambda: device.copy(buffer, wrong, 8),
        "DeviceArray: device": lambda: expertile.DeviceArray.empty(wrong, (2,), np.float32),
        "Window: model": lambda: expertile.Window(wrong),
        "Model": lambda: expertile.Model(wrong),
        "Model: tensors": lambda: expertile.Model.from_tensors({}, wrong),
    }
    for where, call in calls.items():
        with pytest.raises(TypeError, match=rf"^\[{where}\] expected [^\n]*, got {type(wrong).__name__}$"):
            call()


@pytest.mark.parametrize("wrong", [5, b"bytes", [1, 2], 0.5, object()], ids=repr)
def test_an_option_of_another_type_is_refused(
    device: expertile.Device, model: expertile.Model, window: expertile.Window, wrong: Any
) -> None:
    sizes, tensors = synthetic_model("tiny", 2)
    name, tensor = next(iter(tensors.items()))
    no_array = WeightArray(tensor.type, tensor.shape, wrong)
    no_type = WeightArray(wrong, tensor.shape, tensor.data)
    calls: dict[str, Callable[[], Any]] = {
        "open_device: kind": lambda: expertile.open_device(wrong),
        "open_device: order": lambda: expertile.open_device("emulator", order=wrong),
        "open_device: instructions": lambda: expertile.open_device("cpu", instructions=wrong),
        "open_device: matrix": lambda: expertile.open_device("metal", matrix=wrong),
        "open_device: guard": lambda: expertile.open_device("cpu", guard=wrong),
        "Window: device": lambda: expertile.Window(model, wrong),
        "Window: plan": lambda: expertile.Window(model, device, 4, plan=wrong),
        "Window: fuse": lambda: expertile.Window(model, device, 4, fuse=[wrong]),
        "Window: elementwise": lambda: expertile.Window(model, device, 4, elementwise=wrong),
        "Window: precision": lambda: expertile.Window(model, device, 4, precision=wrong),
        "Window: profile": lambda: expertile.Window(model, device, 4, profile=wrong),
        "DeviceArray: writable": lambda: expertile.DeviceArray(device, 0, (0,), np.int8, writable=wrong),
        "combine: plan": lambda: window.combine(wrong, np.zeros((1, 2), np.float32)),
        name: lambda: expertile.Model.from_tensors(sizes, {**tensors, name: no_array}),
        f"{name}: type": lambda: expertile.Model.from_tensors(sizes, {**tensors, name: no_type}),
        "Model: tensors: name": lambda: expertile.Model.from_tensors(sizes, {**tensors, 5: tensor}),
    }
    for where, call in calls.items():
        with pytest.raises(TypeError, match=rf"^\[{where}\] expected [^\n]*, got \w+$"):
            call()


def test_what_is_no_list_no_path_and_no_number_is_refused(
    device: expertile.Device, model: expertile.Model, window: expertile.Window
) -> None:
    sizes, tensors = synthetic_model("tiny", 2)
    calls: dict[str, Callable[[], Any]] = {
        "Window: fuse": lambda: expertile.Window(model, device, 4, fuse="swiglu"),
        "check_groups: groups": lambda: window.check_groups(0, 2, 5),
        "combine: plan": lambda: window.combine({1: 2}, np.zeros((1, 2), np.float32)),
        "DeviceArray: shape": lambda: expertile.DeviceArray.empty(device, 5, np.float32),
        "DeviceArray: dtype": lambda: expertile.DeviceArray.empty(device, (5,), "no type"),
        "open_gguf": lambda: expertile.open_gguf(5),
        "Model: rms_eps": lambda: expertile.Model.from_tensors({**sizes, "rms_eps": "small"}, tensors),
        "Model: expert_ffn": lambda: expertile.Model.from_tensors({**sizes, "expert_ffn": np.array(0.5)}, tensors),
        "open_device: stream": lambda: expertile.open_device("cuda", stream="mine"),
    }
    for where, call in calls.items():
        with pytest.raises((TypeError, ValueError), match=rf"^\[{where}\] expected [^\n]*, got [^\n]*$"):
            call()


def test_an_array_without_dimensions_is_one_number_and_no_list(
    device: expertile.Device, model: expertile.Model, window: expertile.Window
) -> None:
    sizes, tensors = synthetic_model("tiny", 2)
    ffn = np.array(sizes["expert_ffn"][0])
    assert expertile.Model.from_tensors({**sizes, "expert_ffn": ffn}, tensors).config.expert_ffn == [64, 64]
    calls: dict[str, Callable[[], Any]] = {
        "Window: fuse": lambda: expertile.Window(model, device, 4, fuse=np.array("swiglu")),
        "Window: down": lambda: expertile.Window(model, device, 4, down=np.array(16)),
        "check_groups: groups": lambda: window.check_groups(0, 2, [np.array(0)]),
        "DeviceArray: shape": lambda: expertile.DeviceArray.empty(device, np.array(5), np.float32),
    }
    for where, call in calls.items():
        with pytest.raises((TypeError, ValueError), match=rf"^\[{where}\] expected [^\n]*, got [^\n]*$"):
            call()


@pytest.mark.parametrize("dtype", [">f4", object, [("a", "O"), ("b", "f4")], [("a", ">f4")]], ids=str)
def test_arrays_of_objects_and_of_the_other_byte_order_are_refused(device: expertile.Device, dtype: Any) -> None:
    """An object inside a structured type was overwritten with bytes, and its pointer followed."""
    buffer, array = device.alloc(64), np.empty(2, dtype)
    for call in (lambda: device.upload(array), lambda: device.read(buffer, array), lambda: device.write(buffer, array)):
        with pytest.raises(ValueError, match=r"^\[Device\.\w+\] expected a native number type, got [^\n]*$"):
            call()


def test_a_path_with_a_zero_byte_is_refused() -> None:
    """To the system a name ends there, and so did the words of the error."""
    path = str(Path(__file__).parent / "data" / "golden" / "tiny" / "model.gguf")
    for wrong in (f"{path}\0more", f"{path}\0more".encode()):
        with pytest.raises(ValueError, match=r"^\[open_gguf\] expected a path without a zero byte, got b?'"):
            expertile.open_gguf(wrong)


class Unspoken:
    """What a caller's own __repr__ may give."""

    def __init__(self, words: Any) -> None:
        self.words = words

    def __repr__(self) -> Any:
        return 1 / 0 if self.words is None else self.words


LONG = [np.zeros((3, 3)), 10**5000, "x" * 100, [1] * 100, Unspoken("\udc80"), Unspoken(5), Unspoken(None)]


@pytest.mark.parametrize("wrong", LONG, ids=lambda wrong: type(wrong).__name__)
def test_what_is_long_is_named_by_its_type(device: expertile.Device, model: expertile.Model, wrong: Any) -> None:
    sizes, tensors = synthetic_model("tiny", 2)
    calls: list[Callable[[], Any]] = [
        lambda: device.alloc(wrong),
        lambda: expertile.Window(model, device, wrong),
        lambda: expertile.Window(model, device, 4, down=wrong),
        lambda: expertile.Model.from_tensors({**sizes, "rms_eps": wrong}, tensors),
    ]
    for call in calls:
        with pytest.raises(
            ValueError, match=rf"^\[[\w: .]+\] expected .*, got an object of type [\w.]*{type(wrong).__name__}$"
        ):
            call()


@pytest.mark.parametrize("wrong", ["cpu\0", "\ud800", "a\nb"], ids=ascii)
def test_text_that_cannot_be_repeated_is_refused(device: expertile.Device, model: expertile.Model, wrong: str) -> None:
    sizes, tensors = synthetic_model("tiny", 2)
    tensor = next(iter(tensors.values()))
    calls: dict[str, Callable[[], Any]] = {
        "open_device: kind": lambda: expertile.open_device(wrong),
        "open_device: instructions": lambda: expertile.open_device("cpu", instructions=wrong),
        "Window: plan": lambda: expertile.Window(model, device, 4, plan=wrong),
        "Model: tensors: name": lambda: expertile.Model.from_tensors(sizes, {**tensors, wrong: tensor}),
    }
    for where, call in calls.items():
        with pytest.raises(ValueError, match=rf"^\[{where}\] expected printable text, got '.*'$") as error:
            call()
        assert str(error.value).isprintable()


@pytest.mark.parametrize("name", ["token_mixer", "progress"])
def test_a_callback_that_is_no_function_is_refused(window: expertile.Window, name: str) -> None:
    x = random_streams(2, 4, 512)
    for wrong in (5, "text"):
        with pytest.raises(TypeError, match=rf"^\[prompt_chunk: {name}\] expected None or a plain function, got \w+$"):
            window.prompt_chunk(x, **{name: wrong})


@pytest.mark.parametrize("name", ["token_mixer", "progress"])
def test_an_async_callback_is_refused(window: expertile.Window, name: str) -> None:
    """Called, it only makes a coroutine: the layers went on without its attention."""

    async def callback(*_: Any) -> None: ...

    class Server:
        async def __call__(self, *_: Any) -> None: ...

    for wrong in (callback, Server()):
        with pytest.raises(TypeError, match=rf"^\[prompt_chunk: {name}\] expected .*, got an async one$"):
            window.prompt_chunk(random_streams(2, 4, 512), **{name: wrong})


@pytest.mark.parametrize("name", ["token_mixer", "progress"])
def test_a_callback_that_is_not_done_when_it_returns_is_refused(window: expertile.Window, name: str) -> None:
    """What it looks like says nothing: a function that calls an async one, or has a `yield` in it."""
    x, ran = random_streams(2, 4, 512), [0]

    async def later(*_: Any) -> None:
        ran[0] += 1

    def steps(*_: Any) -> Any:
        yield later()

    async def async_steps(*_: Any) -> Any:
        yield

    buffer = window.device.upload(x)
    on_device = expertile.DeviceArray(window.device, buffer.address, x.shape, np.float32, buffer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for wrong, got in ((lambda *_: later(), "coroutine"), (steps, "generator"), (async_steps, "async_generator")):
            for streams in (x, on_device):
                with pytest.raises(TypeError, match=rf"^\[prompt_chunk: {name}\] expected .*, got {got} from it$"):
                    window.prompt_chunk(streams, **{name: wrong})
    assert ran == [0] and window.prompt_chunk(x).shape == x.shape


def test_faults_of_more_tokens_than_there_are_are_refused(window: expertile.Window) -> None:
    """They asked for that much memory first."""
    for name in ("route_faults", "clear_faults"):
        with pytest.raises(ValueError, match=rf"^\[{name}\] expected at most 4 tokens \(max_tokens\), got 5$"):
            getattr(window._core, name)(5)
