"""The measures themselves: each sees the fault that it is there for."""

from __future__ import annotations

import numpy as np
import pytest

from expertile import measure


def test_rel_l2_of_equal_zero_and_unequal_arrays() -> None:
    zeros = np.zeros((3, 4))
    assert measure.rel_l2(zeros, zeros) == 0.0
    assert measure.rel_l2(zeros + 1e-30, zeros) == np.inf
    assert measure.rel_l2(np.float16([60000.0] * 4), np.float16([60000.0] * 4)) == 0.0
    assert measure.rel_l2([1.0, 1.0], [1.0, 0.0]) == pytest.approx(1.0)
    with pytest.raises(ValueError, match=r"expected shape \(2,\), got \(2, 1\)"):
        measure.rel_l2([[1.0], [1.0]], [1.0, 1.0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rel_l2_never_hides_a_number_that_is_none(bad: float) -> None:
    assert measure.rel_l2([bad, 1.0], [0.0, 1.0]) == np.inf
    assert measure.rel_l2([0.0, 1.0], [bad, 1.0]) == np.inf
    assert measure.rel_l2([bad, 1.0], [bad, 1.0]) == 0.0
    assert measure.rel_l2([bad, 1.0], [-bad, 1.0]) == (0.0 if np.isnan(bad) else np.inf)


def test_worst_token_is_not_averaged_away() -> None:
    want = np.ones((1000, 8))
    got = want.copy()
    got[617, 3] = 1.5
    assert measure.rel_l2(got, want) < 1e-2
    value, token = measure.worst_token_rel_l2(got, want)
    assert token == 617 and value == pytest.approx(0.5 / 8**0.5)
    assert measure.worst_token_rel_l2(np.zeros((0, 8)), np.zeros((0, 8))) == (0.0, -1)
    assert measure.worst_token_rel_l2([1.0, 2.0], [1.0, 1.0]) == (1.0, 1)


def test_bitwise_reports_count_first_coordinate_and_values() -> None:
    want = np.arange(12, dtype=np.float32).reshape(3, 4)
    got = want.copy()
    got[1, 2], got[2, 0] = np.nextafter(np.float32(6), np.float32(7)), -1
    with pytest.raises(
        AssertionError, match=r"\[y\] .* got 2 of 12 different, first at \(1, 2\): got 6\.0000004.*, exp.* 6\.0"
    ):
        measure.assert_bitwise_equal(got, want, "y")
    measure.assert_bitwise_equal(want, want.copy(), "y")
    with pytest.raises(ValueError, match="expected type float32, got float64"):
        measure.assert_bitwise_equal(want.astype(np.float64), want)
    with pytest.raises(AssertionError, match=r"first at \(\): got 3, expected 4"):
        measure.assert_bitwise_equal(np.int32(3), np.int32(4))


def test_bitwise_rules_for_nan_zero_and_subnormal() -> None:
    other_nan = np.array([0x7FC00001, 0xFFC00000], dtype=np.uint32).view(np.float32)
    assert not measure.differing(other_nan, np.float32([np.nan, np.nan])).any()
    tiny = np.float32(1e-40)
    assert not measure.differing(np.float32([tiny, 0.0, -tiny]), np.float32([0.0, -tiny, tiny])).any()
    assert measure.differing(np.float32([0.0, tiny]), np.float32([-0.0, 1.2e-38])).tolist() == [True, True]
    # Half subnormals are numbers: they are what a small weight rounds to.
    assert measure.differing(np.float16([6e-8]), np.float16([0.0])).tolist() == [True]
    assert not measure.differing(np.float16([np.nan]), -np.float16([np.nan])).any()
    assert measure.differing(np.uint32([1, 2]), np.uint32([1, 3])).tolist() == [False, True]


def test_half_ulp_distance_counts_across_zero() -> None:
    smallest = np.float16(6e-8)
    assert measure.half_ulp_distance(np.float16([smallest]), np.float16([-smallest])).tolist() == [2]
    assert measure.half_ulp_distance(np.float16([np.inf]), np.float16([65504])).tolist() == [1]
    assert measure.half_ulp_distance(np.float16([np.nan]), np.float16([np.nan])).tolist() == [0]
    with pytest.raises(ValueError, match="expected float16"):
        measure.half_ulp_distance(np.float32([1]), np.float32([1]))


@pytest.mark.parametrize(
    ("got", "wrong", "swaps"),
    [
        ([0, 1, 2], 0, 0),
        ([0, 2, 1], 0, 1),  # near ties inside the chosen
        ([0, 1, 3], 0, 1),  # near tie with the first that was left out
        ([1, 0, 2], 1, 0),  # order of clearly unequal logits
        ([0, 1, 4], 1, 0),
        ([0, 1, 1], 1, 0),  # an expert twice is no swap
        ([0, 1, -1], 1, 0),
        ([0, 1, 9], 1, 0),
    ],
)
def test_compare_ids_forgives_near_ties_only(got: list[int], wrong: int, swaps: int) -> None:
    logits = [[5.0, 2.0, 2.0 - 1e-6, 2.0 - 2e-6, 1.0]]
    found = measure.compare_ids([got], [[0, 1, 2]], logits, 1e-5)
    assert (found.wrong, found.swaps, found.ok) == (wrong, swaps, wrong == 0)
    assert measure.compare_ids([got], [[0, 1, 2]], logits, 1e-9).swaps == 0
