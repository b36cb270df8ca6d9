"""A caller's own memory: windows on arrays in the device's memory, without a copy to the host."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expertile
from expertile import DeviceArray

GOLDEN = Path(__file__).parent / "data" / "golden" / "tiny"


@pytest.fixture(scope="module")
def window(device_name: str) -> expertile.Window:
    return expertile.Window.from_gguf(GOLDEN / "model.gguf", device_name, max_tokens=40)


@pytest.fixture(scope="module")
def x() -> np.ndarray:
    with np.load(GOLDEN / "golden.npz") as arrays:
        return np.array(arrays["layer0/in_streams"])


def on_device(window: expertile.Window, array: np.ndarray, writable: bool = True) -> DeviceArray:
    owner = window.device.upload(np.ascontiguousarray(array))
    return DeviceArray(window.device, owner.address, array.shape, array.dtype, owner, writable)


def test_a_layer_gives_the_same_bits_and_leaves_x_alone(window: expertile.Window, x: np.ndarray) -> None:
    mine = on_device(window, x)
    got = window.moe_layer(1, mine)
    assert isinstance(got, DeviceArray) and got.address != mine.address
    np.testing.assert_array_equal(got.numpy(), window.moe_layer(1, x))
    np.testing.assert_array_equal(mine.numpy(), x)


def test_a_chunk_into_the_callers_array_and_in_place(window: expertile.Window, x: np.ndarray) -> None:
    want = window.prompt_chunk(x)
    mine, out = on_device(window, x, writable=False), on_device(window, np.full_like(x, np.nan))
    assert window.prompt_chunk(mine, out) is out
    np.testing.assert_array_equal(out.numpy(), want)
    again = on_device(window, x)
    assert window.prompt_chunk(again, again) is again
    np.testing.assert_array_equal(again.numpy(), want)


def test_the_token_mixer_changes_the_streams_where_they_lie(window: expertile.Window, x: np.ndarray) -> None:
    def halve(layer: int, streams: Any) -> None:
        if isinstance(streams, DeviceArray):  # what a kernel of the caller's would do
            streams.device.write(streams.buffer, streams.numpy() * np.float32(0.5))
        else:
            streams *= np.float32(0.5)

    steps: list[tuple[int, int]] = []
    got = window.prompt_chunk(on_device(window, x), None, halve, lambda *step: steps.append(step))
    np.testing.assert_array_equal(got.numpy(), window.prompt_chunk(x, token_mixer=halve))
    assert steps == [(layer, window.config.n_layers) for layer in range(window.config.n_layers)]


def test_tokens_that_cannot_be_routed_are_nan_and_named(window: expertile.Window, x: np.ndarray) -> None:
    broken = x.copy()
    broken[3] = np.nan
    out = on_device(window, np.zeros_like(x))
    with pytest.raises(expertile.RouteError) as error:
        window.prompt_chunk(on_device(window, broken), out)
    assert list(error.value.tokens) == [3]
    assert np.isnan(out.numpy()[3]).all()
    np.testing.assert_array_equal(np.delete(out.numpy(), 3, 0), np.delete(window.prompt_chunk(x), 3, 0))


def test_no_tokens_is_no_work(window: expertile.Window, x: np.ndarray) -> None:
    none = DeviceArray(window.device, 0, (0, *x.shape[1:]), np.float32)
    assert window.prompt_chunk(none).shape == none.shape


def test_arrays_that_cannot_be_are_refused(window: expertile.Window, x: np.ndarray) -> None:
    mine = on_device(window, x)
    with pytest.raises(ValueError, match=r"moe_layer\] expected float32 \[\*, 4, \d+\], got float16"):
        window.moe_layer(0, on_device(window, x.astype(np.float16)))
    with pytest.raises(ValueError, match=r"prompt_chunk: out\] expected float32"):
        window.prompt_chunk(mine, on_device(window, x[:5]))
    with pytest.raises(ValueError, match=r"expected a writable array"):
        window.prompt_chunk(mine, on_device(window, x, writable=False))
    with pytest.raises(TypeError, match=r"expected an array of the device, like x, got ndarray"):
        window.prompt_chunk(mine, np.empty_like(x))
    with pytest.raises(ValueError, match=r"at most 40 tokens \(max_tokens\), got 66"):
        window.prompt_chunk(on_device(window, np.concatenate([x, x])))
    with pytest.raises(ValueError, match="adopt"):
        DeviceArray(window.device, 0, x.shape, x.dtype)


def test_an_array_of_another_kind_of_device_is_refused(window: expertile.Window, x: np.ndarray) -> None:
    other = expertile.open_device("cpu" if window.device.kind != "cpu" else "emulator")
    array = DeviceArray(other, x.ctypes.data, x.shape, x.dtype, x)
    with pytest.raises(ValueError, match=rf"expected an array of {window.device.kind}, got one of {other.kind}"):
        window.prompt_chunk(array)


class OfAGpu:
    __cuda_array_interface__ = {"shape": (1, 4, 8), "typestr": "<f4", "data": (4096, False), "version": 3}  # noqa: RUF012


@pytest.mark.parametrize("kind", ["cpu", "emulator"])
def test_a_gpus_array_and_a_stream_are_refused_where_there_is_no_gpu(kind: str) -> None:
    window = expertile.Window.from_gguf(GOLDEN / "model.gguf", kind, max_tokens=4)
    with pytest.raises(ValueError, match=f"expected an array that {kind} can read, got one of a GPU"):
        window.prompt_chunk(OfAGpu())
    with pytest.raises(ValueError, match=f"open_device: {kind}.*expected no stream, got 7"):
        expertile.open_device(kind, stream=7)
    with pytest.raises(AttributeError, match="__cuda_array_interface__"):
        _ = DeviceArray(window.device, 0, (0,), np.float32).__cuda_array_interface__


def test_copies_stay_inside_their_buffers(window: expertile.Window, x: np.ndarray) -> None:
    with pytest.raises(ValueError, match="expected at least 1 byte, got 0"):
        window.device.alloc(0)
    small, large = window.device.alloc(16), window.device.alloc(32)
    with pytest.raises(ValueError, match="copy"):
        window.device.copy(small, large, 17)
    with pytest.raises(ValueError, match="write"):
        window.device.write(small, np.zeros(5, np.float32))
    window.device.write(large, np.arange(8, dtype=np.float32))
    window.device.write(large, np.float32([70]), 4)
    window.device.copy(small, large, 16)
    got = np.empty(4, np.float32)
    window.device.read(small, got)
    assert got.tolist() == [0, 70, 2, 3]


def test_other_threads_run_while_a_device_copies() -> None:
    """A thread that asks for the interpreter gets it only where a call gives it away."""
    device, array = expertile.open_device("cpu", threads=1), np.zeros(1 << 26, np.uint8)
    buffer = device.upload(array)
    turns, done = [0], threading.Event()

    def count() -> None:
        while not done.is_set():
            turns[0] += 1
            time.sleep(0)

    def turns_during(call: Callable[..., Any], *arguments: Any) -> int:
        before = turns[0]
        call(*arguments)
        return turns[0] - before

    interval = sys.getswitchinterval()
    sys.setswitchinterval(30.0)  # no thread is made to give it away
    other = threading.Thread(target=count)
    other.start()
    try:
        while turns[0] == 0:
            time.sleep(0.001)
        for call in ((device.upload, array), (device.write, buffer, array), (device.read, buffer, array)):
            assert turns_during(*call) > 0, call[0]
    finally:
        done.set()
        sys.setswitchinterval(interval)
        other.join()


@pytest.mark.parametrize(
    ("shape", "dtype", "where"),
    [
        ((-1, 4), np.float32, "shape"),
        ((2.5,), np.float32, "shape"),
        ((1 << 62, 8), np.float32, "shape"),
        ((1 << 33, 1 << 33), np.float32, "shape"),
        ((1 << 70,), np.int8, "shape"),
        ((2,), object, "dtype"),
    ],
    ids=str,
)
def test_a_shape_without_a_size_is_refused(device: Any, shape: tuple[Any, ...], dtype: Any, where: str) -> None:
    """2^62 rows of 8 fp32 wrapped to no bytes at all."""
    for make in (DeviceArray.empty, lambda d, *rest: DeviceArray(d, 4096, *rest)):
        with pytest.raises(ValueError, match=rf"^\[DeviceArray: {where}\] expected .*, got "):
            make(device, shape, dtype)
    for address in (-5, 1 << 64, None):
        with pytest.raises(ValueError, match=r"^\[DeviceArray: address\] expected .*, got "):
            DeviceArray(device, address, (2,), np.float32)
