"""What the hardware leaves open in matmul2d shows in the emulator: one test a trap, and the right use beside it."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from emulator.build import FLAGS, INCLUDES, load, run_case
from tensor import library

ORDERS = ("ascending", "reversed", "shuffled")
Floats = npt.NDArray[np.float32]
Product = Callable[..., tuple[str, Floats]]

if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> Product:
    """The error and y [16, 32] of a kernel of traps.metal."""
    kernels = load(library.build_traps(tmp_path_factory.mktemp("tensor") / "traps"))

    def call(
        kernel: str, x: npt.NDArray[np.float16], w: npt.NDArray[np.float16], **options: object
    ) -> tuple[str, Floats]:
        y = np.full((16, 32), 7, np.float32)
        args = np.array([x.shape[1], options.pop("choice", 0)], np.uint32).tobytes()
        by_value = kernel.startswith("staged")
        operands = [(x, not by_value), (w, kernel.startswith("sliced")), (y, True)]
        return run_case(kernels, kernel, args, operands, (1, 1, 1), **options), y  # type: ignore[arg-type]

    return call


def operands(n_inner: int) -> tuple[npt.NDArray[np.float16], npt.NDArray[np.float16]]:
    rng = np.random.default_rng(n_inner)
    return tuple(rng.standard_normal((n, n_inner)).astype(np.float16) for n in (16, 32))  # type: ignore[return-value]


def measured_order(x: npt.NDArray[np.float16], w: npt.NDArray[np.float16]) -> Floats:
    """x w^T by chunks of 16: pairs, then pairs four apart, then one by one into the sum, each rounded to fp32."""
    chunks = -(-x.shape[1] // 16)
    left, right = (np.zeros((len(a), chunks * 16), np.float32) for a in (x, w))
    left[:, : x.shape[1]], right[:, : w.shape[1]] = x, w
    total = np.zeros((len(x), len(w)), np.float32)
    for chunk in range(chunks):
        part = left[:, None, chunk * 16 :][:, :, :16] * right[None, :, chunk * 16 :][:, :, :16]
        p = part[:, :, ::2] + part[:, :, 1::2]
        q = p[:, :, :4] + p[:, :, 4:]
        for j in range(4):
            total = total + q[:, :, j]
    return total


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("n_inner", [32, 64, 96, 40, 7])
def test_the_measured_order_of_additions(product: Product, n_inner: int, order: str) -> None:
    x, w = operands(n_inner)
    want = measured_order(x, w)
    assert (want != (x.astype(np.float32) @ w.T.astype(np.float32))).any() or n_inner == 7
    names = ["staged_right", "staged_right_two", "sliced_dynamic"]
    names += ["sliced_static"] if n_inner % 32 == 0 else []
    names += ["registers_right"] if n_inner == 32 else []
    for name in names:
        error, y = product(name, x, w, order=order)
        assert error == "", name
        np.testing.assert_array_equal(y, want, name)


def test_the_default_mode_overwrites(product: Product) -> None:
    x, w = operands(96)
    error, y = product("staged_overwrites", x, w)
    assert error == ""
    np.testing.assert_array_equal(y, measured_order(x[:, 64:], w[:, 64:]))


def test_an_unset_destination_is_garbage(product: Product) -> None:
    error, y = product("staged_unset", *operands(32))
    assert error == "" and np.isnan(y).all()


def test_unset_weights_in_registers_are_garbage(product: Product) -> None:
    error, y = product("registers_unset", *operands(32))
    assert error == "" and np.isnan(y[:, 31]).all() and not np.isnan(y[:, :31]).any()


def test_swapped_extents_give_zeros(product: Product) -> None:
    error, y = product("staged_swapped", *operands(64))
    assert error == "" and (y == 0).all()


@pytest.mark.parametrize("n_inner", [40, 48])
def test_a_static_k_reads_behind_a_row_that_is_no_multiple_of_it(product: Product, n_inner: int) -> None:
    x, w = operands(n_inner)
    error, y = product("sliced_static", x, w)
    assert error == "" and np.isnan(y).all()
    error, y = product("sliced_dynamic", x, w)
    assert error == ""
    np.testing.assert_array_equal(y, measured_order(x, w))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("choice", "who"), [(0, "matrix calls as by the lanes"), (1, "matmul2d calls of the threadgroup")]
)
def test_every_thread_must_reach_run(product: Product, choice: int, who: str, order: str) -> None:
    error, _ = product("staged_returns", *operands(32), choice=choice, order=order)
    assert error.startswith("DeviceError: [kernel staged_returns, ") and who in error


def test_a_scope_of_other_simdgroups_than_were_dispatched(product: Product) -> None:
    error, _ = product("staged_scope", *operands(32))
    assert "expected matmul2d of the 2 simdgroups that were dispatched, got one of 4" in error
    assert "traps.metal:" in error


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kernel", ["staged_lanes", "registers_lanes"])
def test_no_guess_at_the_lanes_is_right(product: Product, kernel: str, order: str) -> None:
    x, w = operands(32)
    error, y = product(kernel, x, w, order=order)
    assert error == "" and (y != measured_order(x, w)).mean() > 0.9


def test_elements_that_are_not_there(product: Product) -> None:
    error, _ = product("staged_invalid", *operands(32))
    assert "expected the index of a valid element, got element" in error
    error, _ = product("staged_capacity", *operands(32))
    assert re.search(r"expected an element below the capacity (\d+), got \1", error)


@pytest.mark.parametrize("order", ORDERS)
def test_run_is_no_barrier(product: Product, order: str) -> None:
    x, w = operands(64)
    error, y = product("staged_no_barrier", x, w, order=order)
    assert error == "" and not np.array_equal(y, measured_order(x, w))


def test_an_offset_of_two_gigabytes_inside_a_tensor(product: Product) -> None:
    stride = (1 << 30) // 15 + 1  # of halves: that far is the last of 16 rows
    error, _ = product("sliced_static", *operands(32), choice=stride - 32)
    assert f"expected offsets below 2 GB inside a tensor, got {2 * (15 * stride + 31)} bytes" in error
    assert "traps.metal:" in error


def compiled(tmp_path: Path, old: str, new: str) -> str:
    """g++'s complaints about traps.metal with `old` replaced by `new`."""
    text = (Path(library.__file__).parent / "kernels" / "traps.metal").read_text()
    assert old in text
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    (kernels / "traps.metal").write_text(text.replace(old, new))
    unit = library.write_traps(tmp_path, kernels / "traps.metal", "staged_right|registers_right")
    command = ["g++", *FLAGS, library.TENSOR, *INCLUDES, "-fsyntax-only", str(unit)]
    return subprocess.run(command, capture_output=True, text=True).stderr


STAGED_TILE = "matmul2d_descriptor(16, 32, 32, false, true, false,\n"
STAGED_RIGHT = "Staged right(b, dextents<int32_t, 2>(32, 32));"
OF_BFLOAT = """threadgroup bfloat f[1];
  tensor<threadgroup bfloat, dextents<int32_t, 2>, tensor_inline> right(f, dextents<int32_t, 2>(32, 32));"""
RUN = "product.run(left, right, sums);"
RUN_ON_A_VALUE = "product.run(Staged(a, dextents<int32_t, 2>(32, 16)), right, sums);"
SCOPE = "      execution_simdgroup>\n      Product;"
REGISTERS = "cooperative_tensor_right_input_t<half, half,"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (RUN, RUN, ""),
        (STAGED_RIGHT, OF_BFLOAT, "both operands are half"),
        (REGISTERS, REGISTERS.replace("half,", "bfloat,", 1), "bfloat"),
        (STAGED_TILE, STAGED_TILE.replace("16, 32", "8, 24"), "at least one of M and N is a multiple of 16"),
        (STAGED_TILE, STAGED_TILE.replace("16, 32", "16, 12"), "M and N are multiples of 8"),
        (STAGED_TILE, STAGED_TILE.replace("32, false", "24, false"), "K is dynamic or a multiple of 16"),
        ("typedef tensor<threadgroup half,", "typedef tensor<threadgroup const half,", "elements are not const"),
        (RUN, RUN_ON_A_VALUE, "lvalue"),
        (SCOPE, SCOPE.replace("simdgroup>", "simdgroups<2>>"), "operands in registers are one simdgroup's"),
    ],
    ids=["right", "bfloat", "bfloat_registers", "m_or_n", "n", "k", "const", "rvalue", "registers_scope"],
)
def test_what_must_not_compile(tmp_path: Path, old: str, new: str, message: str) -> None:
    complaints = compiled(tmp_path, old, new)
    assert message in complaints and bool(complaints) == bool(message)
