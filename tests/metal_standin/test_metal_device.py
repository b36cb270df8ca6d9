"""The Metal device's host code against the stand-in: memory, libraries, the archive, errors, and what it leaves."""

from __future__ import annotations

import gc
import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expertile
from expertile import _core

GOLDEN = Path(__file__).parent.parent / "data" / "golden"


def plan_args(max_rows: int) -> bytes:
    return struct.pack("<9I", 1, 8, 1, 16, 1, 1, max_rows, 1, 1)


def clear(device: Any, n_rows: int = 300) -> None:
    rows, weights = np.full(n_rows, 7, np.int32), np.full(n_rows, 7, np.float32)
    _core.run_kernel(device, "mm_clear", plan_args(n_rows), [rows, weights], [-(-n_rows // 256), 1, 1])
    assert np.all(rows == -1) and np.all(weights == 0)


def dense(device: Any) -> np.ndarray[Any, Any]:
    """gemm_dense on integers: exact on every device."""
    rng = np.random.default_rng(0)
    x = rng.integers(-4, 5, (5, 64)).astype(np.float16)
    w = rng.integers(-4, 5, (40, 64)).astype(np.float16)
    y = np.full((5, 40), np.nan, np.float32)
    args = struct.pack("<IIIfQ", 5, 40, 64, 1.0, 128)
    _core.run_kernel(device, "gemm_dense_f16_16_64_32_2", args, [x, w.view(np.uint8), y], [1, 1, 1])
    np.testing.assert_array_equal(y, x.astype(np.float32) @ w.astype(np.float32).T)
    return y


def golden_chunk(device: Any) -> np.ndarray[Any, Any]:
    with np.load(GOLDEN / "tiny" / "golden.npz") as arrays:
        x = arrays["layer0/in_streams"]
    window = expertile.Window.from_gguf(GOLDEN / "tiny" / "model.gguf", device, max_tokens=40)
    return np.asarray(window.prompt_chunk(x))


def test_nothing_is_left_when_the_device_goes(standin: Any) -> None:
    before = standin.living()
    device = expertile.open_device("metal")
    golden_chunk(device)
    assert standin.living()["MTLDevice"] == before.get("MTLDevice", 0) + 1
    del device
    gc.collect()
    assert standin.living() == before


def test_one_command_buffer_and_one_encoder_a_program_and_a_barrier_between_groups(standin: Any) -> None:
    device = expertile.open_device("metal")
    window = expertile.Window.from_gguf(GOLDEN / "tiny" / "model.gguf", device, max_tokens=40)
    groups = window.program(0, 5)["groups"]
    x = np.ones((5, window.config.n_streams, window.config.dim), np.float32)
    before = standin.counts()
    window.moe_layer(0, x)
    after = standin.counts()
    got = {name: after[name] - before[name] for name in ("command_buffers", "encoders", "barriers", "dispatches")}
    assert got == {
        "command_buffers": 1,
        "encoders": 1,
        "barriers": len(groups) - 1,
        "dispatches": sum(len(group["launches"]) for group in groups),
    }


def test_weights_in_a_file_are_adopted_and_small_or_refused_ones_copied(standin: Any) -> None:
    before = standin.counts()
    whole = golden_chunk(expertile.open_device("metal"))
    adopted = standin.counts()["adopted_bytes"] - before["adopted_bytes"]
    assert adopted > 1 << 16
    standin.settings().no_copy = False
    before = standin.counts()
    np.testing.assert_array_equal(golden_chunk(expertile.open_device("metal")), whole)
    assert standin.counts()["adopted_bytes"] == before["adopted_bytes"]


def test_a_buffer_beyond_the_limit_is_refused_with_both_sizes(standin: Any) -> None:
    standin.settings().max_buffer_bytes = 1 << 20
    device = expertile.open_device("metal")
    with pytest.raises(RuntimeError, match=r"\[metal alloc\] expected at most 1048576 bytes a buffer, got 1048577"):
        device.alloc((1 << 20) + 1)
    with pytest.raises(ValueError, match=r"expected at least 1 byte"):
        device.alloc(0)
    clear(device)


def test_a_gpu_with_fewer_threads_is_refused_by_kernel(standin: Any) -> None:
    standin.settings().max_threads = 512
    device = expertile.open_device("metal")
    clear(device)
    ids = np.zeros((1, 1), np.int32)
    with pytest.raises(RuntimeError, match=r"kernel mm_hist\] expected 1024 threads a threadgroup, got 512"):
        _core.run_kernel(device, "mm_hist", plan_args(16), [ids, np.zeros(8, np.uint32)], [1, 1, 1])


def test_zero_grids_are_refused_before_metal_sees_them(standin: Any) -> None:
    device = expertile.open_device("metal")
    rows, weights = np.zeros(8, np.int32), np.zeros(8, np.float32)
    with pytest.raises(RuntimeError, match=r"kernel mm_clear\] expected a grid of at least \(1, 1, 1\)"):
        _core.run_kernel(device, "mm_clear", plan_args(8), [rows, weights], [0, 1, 1])
    clear(device)


def test_a_hazard_inside_a_group_is_found_by_the_driver(standin: Any) -> None:
    """check_program finds it too; here a program that nobody checked."""
    device = expertile.open_device("metal")
    with pytest.raises(RuntimeError, match=r"no memoryBarrier between kernel mm_clear \(stok\) and kernel mm_clear"):
        standin.run_clear_twice(device, one_group=True)
    assert standin.take_faults()
    standin.run_clear_twice(device, one_group=False)


def test_a_table_of_stale_pointers_is_refused(standin: Any) -> None:
    device = expertile.open_device("metal")
    table = np.array([12345], np.uint64)
    arrays = [np.zeros(32, np.float16), table, np.ones(1, np.float32), np.zeros(4, np.uint32), np.zeros(14, np.uint32)]
    args = struct.pack("<IIIfQ", 1, 1, 32, 1.0, 34)
    with pytest.raises(RuntimeError, match=r"buffer table\] expected addresses of this device's buffers, got another"):
        _core.run_kernel(device, "gemm_grouped_q8_0_16_64_32_2", args, [*arrays, np.zeros(16, np.float32)], [1, 1, 1])


def test_a_fault_of_the_gpu_names_the_program_and_leaves_the_device_usable(standin: Any) -> None:
    device = expertile.open_device("metal")
    standin.settings().fails_on_the_gpu = "mm_clear"
    with pytest.raises(RuntimeError, match=r"mm_clear, kernel mm_clear\] expected the GPU to finish, got planted"):
        clear(device)
    standin.settings().fails_on_the_gpu = ""
    clear(device)


def test_a_library_that_does_not_compile_names_kernel_file_and_reason(standin: Any) -> None:
    standin.settings().fails_to_compile = "plan.metal"
    device = expertile.open_device("metal")
    message = (
        r"kernel mm_clear\] expected a pipeline, got the compiler's words on plan\.metal: .*planted in plan\.metal"
    )
    with pytest.raises(RuntimeError, match=message):
        clear(device)
    dense(device)


def test_a_pipeline_that_fails_names_the_kernel(standin: Any) -> None:
    standin.settings().fails_as_pipeline = "mm_clear"
    with pytest.raises(RuntimeError, match=r"kernel mm_clear\] expected a pipeline, got Compiler encountered"):
        clear(expertile.open_device("metal"))


# The tensor library


def with_accelerators(standin: Any) -> None:
    standin.settings().family = 1010


def quiet(call: Any, *arguments: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return call(*arguments)


def tensor_dispatches(standin: Any, device: Any, call: Any = dense) -> int:
    before = standin.counts()["tensor_dispatches"]
    quiet(call, device)
    return int(standin.counts()["tensor_dispatches"] - before)


def test_tensor_library_is_used_by_the_gemms_where_the_gpu_has_accelerators(standin: Any) -> None:
    assert tensor_dispatches(standin, expertile.open_device("metal")) == 0
    with_accelerators(standin)
    device = expertile.open_device("metal")
    assert tensor_dispatches(standin, device) == 1
    assert tensor_dispatches(standin, device, clear) == 0
    standin.settings().os_minor = 1
    assert tensor_dispatches(standin, expertile.open_device("metal")) == 0


def test_tensor_library_is_compiled_lazily(standin: Any) -> None:
    with_accelerators(standin)
    device = expertile.open_device("metal")
    before = standin.counts()["libraries"]
    clear(device)
    assert standin.counts()["libraries"] == before + 1
    dense(device)
    assert standin.counts()["libraries"] == before + 2


@pytest.mark.parametrize("failing", ["gemm.metal tensor", "pipeline"])
def test_a_tensor_library_that_fails_is_said_once_and_base_gives_the_same(standin: Any, failing: str) -> None:
    """Case 20 of the named faults."""
    want = golden_chunk(expertile.open_device("metal"))
    with_accelerators(standin)
    if failing == "pipeline":
        standin.settings().fails_as_pipeline = "gemm_dense_f16_16_64_32_2 tensor"
    else:
        standin.settings().fails_to_compile = failing
    device = expertile.open_device("metal")
    with pytest.warns(RuntimeWarning, match=r"expected the tensor kernels to compile, got .*base kernels run") as told:
        dense(device)
    assert len(told) == 1
    assert tensor_dispatches(standin, device) == 0
    got = quiet(golden_chunk, device)
    assert np.linalg.norm(got - want) <= 1e-3 * np.linalg.norm(want)


def test_a_chosen_matrix_form_is_used_or_refused(standin: Any) -> None:
    with pytest.raises(ValueError, match=r"matrix\] expected base, staged or k4, got wmma"):
        expertile.open_device("metal", matrix="wmma")
    with pytest.raises(ValueError, match=r"matrix\] expected the device metal, got cpu"):
        expertile.open_device("cpu", matrix="base")
    with pytest.raises(RuntimeError, match=r"matrix k4\] expected a GPU with neural accelerators"):
        expertile.open_device("metal", matrix="k4")
    with_accelerators(standin)
    for matrix, dispatches in (("base", 0), ("staged", 1), ("k4", 1)):
        assert tensor_dispatches(standin, expertile.open_device("metal", matrix=matrix)) == dispatches
    standin.settings().fails_to_compile = "gemm.metal k4"
    with pytest.raises(RuntimeError, match=r"planted in gemm\.metal k4"):
        dense(expertile.open_device("metal", matrix="k4"))


# The system


def test_an_older_system_gets_the_older_call_for_safe_math(standin: Any) -> None:
    standin.settings().os_major = 14
    dense(expertile.open_device("metal"))


@pytest.mark.parametrize(
    ("field", "value", "why"), [("present", False, "no GPU"), ("family", 1006, "Apple7"), ("os_major", 13, "macOS 14")]
)
def test_a_machine_without_what_is_needed_says_why(standin: Any, field: str, value: Any, why: str) -> None:
    setattr(standin.settings(), field, value)
    status = next(status for status in expertile.list_devices() if status.kind == "metal")
    assert not status.present and why in status.detail
    with pytest.raises(RuntimeError, match=why):
        expertile.open_device("metal")


# The archive of compiled pipelines


def compiled(standin: Any) -> tuple[int, int]:
    """Pipelines compiled and taken from the archive by a device of its own."""
    before = standin.counts()
    device = expertile.open_device("metal")
    clear(device)
    dense(device)
    after = standin.counts()
    del device
    gc.collect()
    return after["pipelines"] - before["pipelines"], after["from_archive"] - before["from_archive"]


def test_compiled_pipelines_are_kept_on_disk_and_damaged_ones_made_again(standin: Any, tmp_path: Path) -> None:
    assert compiled(standin) == (2, 2)  # compiled into the archive, taken from it
    (file,) = (tmp_path / "expertile" / "metal").iterdir()
    whole = file.read_bytes()
    assert compiled(standin) == (0, 2)
    file.write_bytes(b"damaged")
    assert compiled(standin) == (2, 2)
    assert file.read_bytes() == whole
    standin.settings().os_minor = 3  # another system: its own archive
    assert compiled(standin) == (2, 2)
    assert len(list(file.parent.iterdir())) == 2


def test_an_archive_that_cannot_be_written_is_no_error(
    standin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert compiled(standin) == compiled(standin) == (2, 2)


# A server's own objects


def test_a_server_hands_in_its_device_queue_and_buffers(standin: Any) -> None:
    before = standin.living()
    standin.serve()
    assert standin.living() == before
