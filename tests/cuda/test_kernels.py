"""The GPU against the emulator, kernel by kernel: the same bits where they are promised, else within the bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from launches import Array, Run, all_runs, run

from expertile.measure import assert_bitwise_equal, half_ulp_distance, worst_token_rel_l2
from expertile.quants import TYPES

# The two of the model's experts, and one of each family.
GEMM_BOUND = 5e-5  # of two devices' fp32 sums, relative to the row
FORMATS = ["IQ2_XS", "IQ4_NL", "Q8_0", "Q4_K", "F16", "F32"]


def assert_close(got: Array, want: Array, how: str, name: str) -> None:
    if how == "exact":
        assert_bitwise_equal(got, want, name)
    elif how == "half":
        assert np.max(half_ulp_distance(got, want)) <= 1, name
    elif how == "float":
        # Of a sum that cancels, relative to what was added.
        assert np.allclose(got, want, rtol=2e-6, atol=2e-6, equal_nan=True), name
    elif got.dtype == np.float16:
        assert_half_product(got, want, name)
    else:
        worst, token = worst_token_rel_l2(got, want)
        assert worst <= GEMM_BOUND, f"{name}: {worst} at row {token}"


def assert_half_product(got: Array, want: Array, name: str) -> None:
    """A half that is rounded from a GEMM's sums: one unit in the last place, or what sums in another order may be off
    by, which is more than that where they cancel."""
    size = np.sqrt(np.mean(want.astype(np.float64) ** 2, axis=-1, keepdims=True))
    with np.errstate(invalid="ignore"):  # infinities, which half_ulp_distance compares
        near = np.abs(got.astype(np.float64) - want.astype(np.float64)) <= GEMM_BOUND * size
    wrong = ~near & (half_ulp_distance(got, want) > 1)
    at = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
    assert not wrong.any(), f"{name}: {np.count_nonzero(wrong)} wrong, first at {at}: {got[at]!r}, not {want[at]!r}"


def check(gpu: Any, emulator: Any, launch: Run) -> None:
    want = run(emulator, launch)
    got = run(gpu, launch)
    for index, how in launch.outputs.items():
        assert_close(got[index], want[index], how, f"{launch.kernel}, buffer {index + 1}")


def test_every_kernel_agrees_with_the_emulator(gpu: Any, emulator: Any) -> None:
    launches = all_runs(FORMATS)
    failures = []
    for launch in launches:
        try:
            check(gpu, emulator, launch)
        except AssertionError as error:
            failures.append(str(error))
    print(f"{len(launches)} launches of {len({launch.kernel for launch in launches})} kernels")
    assert not failures, "\n".join(failures)


def test_the_comparison_of_halves_sees_two_units_in_the_last_place() -> None:
    want = np.random.default_rng(4).standard_normal((9, 33)).astype(np.float16)
    want[4, 2:] = 0  # a row of one large value: a unit in its last place is 2^-11 to 2^-10 of the row
    for units, right in ((0, True), (1, True), (2, False), (-2, False)):
        for at in ((4, 0), (8, 32)):
            got = want.copy()
            got[at] = (got[at].view(np.int16) + units).view(np.float16)
            if right:
                assert_close(got, want, "gemm", "halves")
            else:
                with pytest.raises(AssertionError, match="halves: 1 wrong"):
                    assert_close(got, want, "gemm", "halves")
    got = want.copy()
    got[3, 3] = np.nan
    with pytest.raises(AssertionError, match="halves: 1 wrong"):
        assert_close(got, want, "gemm", "halves")


def test_ten_runs_give_the_same_bits(gpu: Any) -> None:
    for launch in all_runs(["IQ2_XS"]):
        first = run(gpu, launch)
        for _ in range(9):
            for index, array in run(gpu, launch).items():
                assert_bitwise_equal(array, first[index], launch.kernel)


def test_a_result_does_not_depend_on_the_tile(gpu: Any) -> None:
    for name in FORMATS:
        seen: dict[str, Array] = {}
        for launch in all_runs([name]):
            for kind in ("gemm_dense_", "gemm_hc_up_"):
                if not launch.kernel.startswith(kind) or launch.kernel.startswith("gemm_dense_fp32"):
                    continue
                # The same operands under every tile: those of the first launch.
                key = f"{kind}{name}"
                index = next(iter(launch.outputs))
                operands = seen.setdefault(f"{key} operands", launch.buffers)  # type: ignore[arg-type]
                launch.buffers = operands  # type: ignore[assignment]
                got = run(gpu, launch)[index]
                assert_bitwise_equal(got, seen.setdefault(key, got), launch.kernel)


@pytest.mark.parametrize("name", sorted(TYPES))
def test_decoder_agrees_with_the_reference(gpu: Any, name: str) -> None:
    from expertile.quants import dequantize

    launch = next((one for one in all_runs([]) if one.kernel == f"dequantize_{name.lower()}"), None)
    if launch is None:
        pytest.skip(f"this build has no dequantize_{name.lower()}")
    got = run(gpu, launch)[1]
    want = dequantize(launch.buffers[0], name, (got.size,)).astype(np.float32)
    assert_bitwise_equal(got, want.reshape(-1), name)
