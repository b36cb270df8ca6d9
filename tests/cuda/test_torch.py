"""A caller that is torch: its stream, its tensors in and out, its kernels as token mixer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "tiny"


@pytest.fixture(scope="module")
def torch(gpu: Any) -> Any:
    module = pytest.importorskip("torch", reason="torch is not installed")
    if not module.cuda.is_available():
        pytest.skip("torch sees no GPU")
    return module


@pytest.fixture(scope="module")
def x() -> np.ndarray:
    with np.load(GOLDEN / "golden.npz") as arrays:
        return np.array(arrays["layer0/in_streams"])


def open_window(stream: Any = None) -> Any:
    import expertile

    device = expertile.open_device("cuda", stream=None if stream is None else stream.cuda_stream)
    return expertile.Window.from_gguf(GOLDEN / "model.gguf", device, max_tokens=40)


def streams_of(torch: Any) -> dict[str, Any]:
    return {
        "of the device": None,
        "torch's default": torch.cuda.default_stream(),
        "another of torch's": torch.cuda.Stream(),
    }


@pytest.mark.parametrize("which", ["of the device", "torch's default", "another of torch's"])
def test_tensors_in_and_out(torch: Any, x: np.ndarray, which: str) -> None:
    stream = streams_of(torch)[which]
    window = open_window(stream)
    want = window.prompt_chunk(x)
    with torch.cuda.stream(stream):
        mine = torch.as_tensor(x, device="cuda")
        out = torch.full_like(mine, float("nan"))
        assert window.prompt_chunk(mine, out) is out
        np.testing.assert_array_equal(out.cpu().numpy(), want)
        fresh = torch.as_tensor(window.prompt_chunk(mine), device="cuda")
        np.testing.assert_array_equal(fresh.cpu().numpy(), want)
        np.testing.assert_array_equal(mine.cpu().numpy(), x)


@pytest.mark.parametrize("which", ["of the device", "torch's default", "another of torch's"])
def test_work_is_ordered_behind_what_the_caller_has_put_before(torch: Any, x: np.ndarray, which: str) -> None:
    """A slow kernel of torch's, then the one that makes x: a window that did not wait would read the old values."""
    stream = streams_of(torch)[which]
    window = open_window(stream)
    want = window.prompt_chunk(x)
    source = torch.as_tensor(x, device="cuda")
    torch.cuda.synchronize()
    for _ in range(3):
        with torch.cuda.stream(stream):
            mine = torch.zeros_like(source)
            torch.cuda._sleep(200_000_000)  # 0.1 s
            mine.copy_(source)
            got = window.prompt_chunk(mine)
        np.testing.assert_array_equal(got.numpy(), want)


@pytest.mark.parametrize("which", ["of the device", "another of torch's"])
def test_a_token_mixer_of_torchs(torch: Any, x: np.ndarray, which: str) -> None:
    stream = streams_of(torch)[which]
    window = open_window(stream)

    def on_host(layer: int, streams: np.ndarray) -> None:
        streams *= np.float32(0.5)

    def on_device(layer: int, streams: Any) -> None:
        tensor = torch.as_tensor(streams, device="cuda")
        assert tensor.data_ptr() == streams.address
        torch.cuda._sleep(50_000_000)
        tensor.mul_(0.5)

    want = window.prompt_chunk(x, token_mixer=on_host)
    with torch.cuda.stream(stream):
        got = window.prompt_chunk(torch.as_tensor(x, device="cuda"), token_mixer=on_device)
    np.testing.assert_array_equal(got.numpy(), want)


def test_tensors_that_cannot_be_are_refused(torch: Any, x: np.ndarray) -> None:
    window = open_window()
    mine = torch.as_tensor(x, device="cuda")
    with pytest.raises(ValueError, match="C-contiguous"):
        window.prompt_chunk(torch.cat([mine, mine], dim=2)[:, :, : x.shape[2]])
    with pytest.raises(ValueError, match="expected float32"):
        window.prompt_chunk(mine.half())
    with pytest.raises(ValueError, match="got Tensor"):
        window.prompt_chunk(mine.cpu())
    with pytest.raises(TypeError, match="got ndarray"):
        window.prompt_chunk(mine, np.empty_like(x))


def test_adopted_memory_is_checked(torch: Any) -> None:
    import expertile

    gpu = expertile.open_device("cuda")
    tensor = torch.zeros(1 << 20, device="cuda")
    buffer = gpu.adopt(tensor.data_ptr(), tensor.nbytes)
    assert (buffer.address, buffer.bytes) == (tensor.data_ptr(), tensor.nbytes)
    host = np.zeros(16, np.float32)
    with pytest.raises(ValueError, match=r"adopt.*expected memory of .*, got (memory that CUDA|host memory)"):
        gpu.adopt(host.ctypes.data, host.nbytes)
    pinned = torch.zeros(16).pin_memory()
    with pytest.raises(ValueError, match=r"adopt.*got host memory"):
        gpu.adopt(pinned.data_ptr(), pinned.nbytes)
    with pytest.raises(ValueError, match=r"adopt.*up to the end of its allocation"):
        gpu.adopt(tensor.data_ptr(), 1 << 50)
    with pytest.raises(ValueError, match=r"adopt.*0 bytes"):
        gpu.adopt(tensor.data_ptr(), 0)


def test_the_readmes_example_runs(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    blocks = re.findall(r"```python\n(.*?)```", (root / "README.md").read_text(), re.DOTALL)
    scope: dict[str, Any] = {}
    exec(blocks[1], scope)
    exec(blocks[2], scope)
    got = scope["y"]
    assert got.is_cuda and got.shape == scope["x"].shape
    on_host = {"token_mixer": lambda layer, streams: np.multiply(streams, np.float32(0.5), out=streams)}
    np.testing.assert_array_equal(got.cpu().numpy(), scope["window"].prompt_chunk(scope["x"].cpu().numpy(), **on_host))
