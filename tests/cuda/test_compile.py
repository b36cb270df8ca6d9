"""Every kernel's CUDA text compiles under NVRTC. Needs no GPU, only the library; of the GEMMs a sample."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
METAL = ROOT / "metal"
sys.path.insert(0, str(METAL))

import lower_cuda  # noqa: E402
from signatures import read_source  # noqa: E402

OPTIONS = (
    "--gpu-architecture=sm_90",
    "--std=c++20",
    "--device-as-default-execution-space",
    "--fmad=false",
)
# One tile of the cheapest and of the dearest format; the other kernels all.
SAMPLE = ("f16_16_64_32_2", "iq2_xs_16_32_32_4", "iq4_nl_64_64_32_4", "fp32_32_64_32_4")


def load_nvrtc() -> ctypes.CDLL:
    """The wheel's library, with its builtins, or a system's."""
    from expertile.nvrtc import load_nvrtc as load

    path = load()
    for builtins in Path(path).parent.glob("libnvrtc-builtins.so*") if path else []:
        ctypes.CDLL(str(builtins))
    for name in (path, "libnvrtc.so.13", "/usr/local/cuda/lib64/libnvrtc.so.13"):
        try:
            if name:
                return ctypes.CDLL(name)
        except OSError:
            continue
    pytest.skip("NVRTC 13 is not installed (pip install nvidia-cuda-nvrtc)")


def texts(pairs: list[str]) -> Any:
    return (ctypes.c_char_p * len(pairs))(*[text.encode() for text in pairs])


def compile_log(nvrtc: ctypes.CDLL, name: str, source: str, headers: dict[str, str]) -> tuple[int, str]:
    """NVRTC's result and log, warnings included."""
    program = ctypes.c_void_p()
    created = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program),
        source.encode(),
        f"{name}.cu".encode(),
        len(headers),
        texts(list(headers.values())),
        texts(list(headers)),
    )
    assert created == 0
    result = nvrtc.nvrtcCompileProgram(program, len(OPTIONS), texts(list(OPTIONS)))
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return result, log.value.decode()


@pytest.fixture(scope="module")
def sources() -> list[Any]:
    directories = [METAL / "kernels", METAL / "bench"]
    return lower_cuda.read_all("c++", directories, METAL / "include", METAL / "portability")


def test_every_kernel_compiles_without_a_warning(sources: list[Any]) -> None:
    nvrtc = load_nvrtc()
    shim = lower_cuda.shim_texts(METAL / "portability")
    compiled = 0
    for source in sources:
        headers = shim | {f"{source.path}.cuh": lower_cuda.file_text(source)}
        for kernel in source.kernels:
            if kernel.template_arguments and kernel.name.startswith("gemm") and not kernel.name.endswith(SAMPLE):
                continue
            text = f'#include "{source.path}.cuh"\n{lower_cuda.entry_text(kernel)}'
            result, log = compile_log(nvrtc, kernel.name, text, headers)
            assert (result, log.strip()) == (0, ""), f"{kernel.name}: {log}"
            compiled += 1
    assert compiled >= 11


def test_an_entry_point_takes_args_by_value_then_buffers_then_rows(sources: list[Any]) -> None:
    plan = next(source for source in sources if source.path == "plan.metal")
    hist = next(kernel for kernel in plan.kernels if kernel.name == "mm_hist")
    text = lower_cuda.entry_text(hist)
    assert 'extern "C" __global__ void __launch_bounds__(1024) mm_hist(' in text
    assert "const __grid_constant__ PlanArgs args, const int* ids, uint* bcnt, const uint grid_rows)" in text
    assert "mm_hist(args, ids, bcnt, uint(threadIdx.x), uint(group_x));" in text


def kernel_of(sources: list[Any], name: str) -> Any:
    return next(kernel for source in sources for kernel in source.kernels if kernel.name == name)


def test_every_kernel_waits_for_the_launch_before(sources: list[Any]) -> None:
    """At its start, or itself behind what the device may not let it read while the launch before writes it."""
    for name, early, mask in (
        ("mm_gather", None, 0),
        ("mm_hist", [], 0),
        ("mm_single", [], 0),
        ("mm_place_from_counts", ["ids", "weights"], 3),
        ("mm_place_from_offsets", ["ids", "weights"], 3),
    ):
        kernel = kernel_of(sources, name)
        assert lower_cuda.early_buffers(kernel) == early
        assert lower_cuda.early_mask(kernel) == mask
        assert ("await_inputs();" in lower_cuda.entry_text(kernel)) == (early is None)


def test_nothing_is_written_ahead_of_the_wait() -> None:
    head = "[[kernel, max_total_threads_per_threadgroup(32)]] void f(constant A& args [[buffer(0)]], "
    text = head + "device int* out [[buffer(1)]]) { out[0] = 1; await_inputs(); }"
    with pytest.raises(lower_cuda.SourceError, match=r"expected out to be const ahead of await_inputs\(\), got device"):
        lower_cuda.entry_text(read_source(text, "f.metal").kernels[0])


def test_threadgroup_memory_becomes_shared(sources: list[Any]) -> None:
    plan = next(source for source in sources if source.path == "plan.metal")
    text = lower_cuda.file_text(plan)
    assert "__shared__ __align__(16) atomic_uint counts[4096];" in text
    assert "threadgroup " not in text and "[[" not in text.replace("[[nodiscard", "")


def test_what_isolate_takes_out_of_the_kernels_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every edit of the measurement changes the text that it names."""
    import isolate

    def text_of(self: Any, kernel: str, file: str, entry: str, shim: dict[str, str] | None = None) -> str:
        return f"{(shim or self.shim)['threads.h']}{file}{entry}"

    monkeypatch.setattr(isolate.Texts, "compile", text_of)
    forms = isolate.Texts().forms()
    for kernel in isolate.KERNELS:
        mine = [text for (name, _), text in forms.items() if name == kernel]
        assert len(set(mine)) == len(mine) >= 3
