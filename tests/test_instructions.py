"""The cpu device's instruction sets and precisions: every table that this machine runs, against numpy and each other.

`pytest tests/test_instructions.py` on another machine tests what that one has (AMX, AVX-512, NEON ...).
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import integer_weight, random_weight
from kernel_checks import GEMM_BOUND, TILES, Array, gemm_args, kernel_name, matrix_of, poisoned
from layer_windows import QUICK, SMALL_TILE, model_of, own_routing

import expertile
from expertile import _core, cli, quants, reference
from expertile.layer_weights import WeightArray
from expertile.measure import assert_bitwise_equal, rel_l2, worst_token_rel_l2

INSTRUCTIONS = _core.cpu_instructions()
PRECISIONS = ("exact", "bf16")
BF16_BOUND = 4e-3
TYPES = list(quants.TYPES)
# Tables whose sums have the order of 16 partial sums: they agree bit for bit.
COMMON_ORDER = {"avx512", "avx2", "neon", "portable"}


@cache
def device_of(instructions: str, threads: int = 1) -> Any:
    return expertile.open_device("cpu", threads=threads, guard=True, instructions=instructions)


def dense(device: Any, x: Array, weight: WeightArray, precision: str) -> Array:
    """y [n_rows, n_cols], poisoned beforehand."""
    n_rows, n_cols = len(x), weight.shape[1]
    y = poisoned(n_rows, n_cols)
    tile = TILES[0]
    grid = [-(-n_cols // tile[1]), -(-n_rows // tile[0]), 1]
    buffers = [np.ascontiguousarray(x), weight.data, y]
    kernel = kernel_name("gemm_dense", weight.type, tile)
    _core.run_kernel(device, kernel, gemm_args(n_rows, weight), buffers, grid, precision)
    return y


def operands(type_name: str, n_rows: int, n_cols: int, n_inner: int = 0) -> tuple[WeightArray, Array]:
    rng = np.random.default_rng(n_cols)
    n_inner = n_inner or (768 if quants.type_info(type_name).elements > 1 else 588)
    x = rng.standard_normal((n_rows, n_inner)).astype(np.float16)
    return random_weight(type_name, (n_inner, n_cols), rng), x


def rounded(values: Array) -> Array:
    """To bf16, to nearest even, as float64."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


def test_names_and_refusals() -> None:
    assert "portable" in INSTRUCTIONS and len(set(INSTRUCTIONS)) == len(INSTRUCTIONS)
    for name in INSTRUCTIONS:
        assert device_of(name).name.endswith(f"({name})")
    assert expertile.open_device("cpu").name == device_of(INSTRUCTIONS[0]).name
    with pytest.raises(ValueError, match=r"expected what this machine has: .*portable, got mmx"):
        expertile.open_device("cpu", instructions="mmx")


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_every_format(instructions: str, precision: str, type_name: str) -> None:
    """Against numpy's product of the same operands; where the order of sums is common, the portable table's bits."""
    weight, x = operands(type_name, 37, 70)
    matrix, half = matrix_of(weight), x.astype(np.float64)
    got = dense(device_of(instructions), x, weight, precision)
    want = half @ matrix.T if precision == "exact" else half @ rounded(matrix).T
    error, row = worst_token_rel_l2(got, want)
    assert error <= GEMM_BOUND, f"{error:.2e} in row {row}"
    if precision == "bf16" and type_name != "BF16":
        assert 5e-5 < rel_l2(got, half @ matrix.T) <= BF16_BOUND
    if instructions in COMMON_ORDER:
        assert_bitwise_equal(got, dense(device_of("portable"), x, weight, precision), instructions)


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_integers_are_exact(instructions: str, type_name: str) -> None:
    rng = np.random.default_rng(17)
    weight = integer_weight(type_name, (2 * max(quants.type_info(type_name).elements, 48), 40), rng)
    x = rng.integers(-3, 4, (21, weight.shape[0])).astype(np.float16)
    want = (x.astype(np.float64) @ matrix_of(weight).T).astype(np.float32) + np.float32(0)
    assert_bitwise_equal(dense(device_of(instructions), x, weight, "exact") + np.float32(0), want, "y")


@pytest.mark.parametrize("n_inner", [32, 96, 640, 2560])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_a_row_is_the_same_among_any_number(instructions: str, precision: str, n_inner: int) -> None:
    weight, x = operands("IQ4_NL", 300, 40, n_inner)
    x[7, 3] = np.nan
    whole = dense(device_of(instructions, 2), x, weight, precision)
    assert np.isnan(whole[7]).all() and np.isfinite(np.delete(whole, 7, axis=0)).all()
    for n_rows in (*range(1, 41), 96, 97, 256, 257):
        part = dense(device_of(instructions, 1 + n_rows % 3), x[-n_rows:], weight, precision)
        assert_bitwise_equal(part, whole[-n_rows:], f"the last {n_rows} rows")


@pytest.mark.parametrize("fuse", [(), ("gatherless", "combine"), ("swiglu", "combine")], ids="-".join)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_a_token_does_not_depend_on_chunk_tile_threads_or_fusion(instructions: str, precision: str, fuse: Any) -> None:
    case = replace(QUICK, n_tokens=70)
    model, x = model_of(case), case.x()

    def layer(threads: int, tile: Any, borders: list[int], forms: Any) -> Array:
        device = device_of(instructions, threads)
        window = expertile.Window(
            model, device, case.n_tokens, gate_up=tile, down=tile, precision=precision, fuse=forms
        )
        return np.concatenate([window.moe_layer(0, part) for part in np.split(x, borders)])

    want = layer(1, SMALL_TILE, [], ())
    assert np.isfinite(want).all() and not np.array_equal(want, x)
    for threads, tile, borders in ((2, SMALL_TILE, []), (1, TILES[3], [1, 2, 30]), (3, TILES[2], [69])):
        assert_bitwise_equal(layer(threads, tile, borders, fuse), want, f"{threads} threads, {tile}, cut at {borders}")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_layer_against_the_reference(instructions: str, precision: str) -> None:
    """The routed and the shared experts, each from `mixed` on, against the exact float reference: worst token."""
    types = QUICK.types | {"ffn_gate_exps": "IQ2_XS", "ffn_up_exps": "IQ2_XS", "ffn_down_exps": "IQ4_NL"}
    case = replace(QUICK, n_tokens=40, dim=1024, ffn=256, shared_ffn=128, types=types)
    window = expertile.Window(model_of(case), device_of(instructions), case.n_tokens, precision=precision)
    weights, x = case.weights(), case.x()
    ids, route_weights = own_routing(window, x)
    mixed = window.hc_read(0, x)["mixed"]
    plan = window.plan(ids, route_weights)
    rows = reference.gather(reference.to_half(mixed)[0], plan["row_token"])
    routed = window.combine(plan, window.experts(0, plan, rows)["expert_out"])
    exact = reference.experts(mixed, ids, weights, "exact")
    bound = 1e-3 if precision == "exact" else BF16_BOUND
    for name, got, want in (
        ("routed", routed, reference.combine(ids, route_weights, exact["down"])),
        ("shared", window.shared(0, mixed)["shared_out"], reference.shared(mixed, weights, "exact")["down"]),
    ):
        error, token = worst_token_rel_l2(got, want)
        assert error <= bound, f"{name}: {error:.2e} at token {token}"
        assert precision == "exact" or error > 5e-4, f"{name}: {error:.2e} is too good for bf16"


def test_what_chooses_the_experts_stays_exact() -> None:
    """Only GEMMs of the experts are rounded, and the schedule says so."""
    model = model_of(QUICK)
    windows = [expertile.Window(model, device_of("portable"), QUICK.n_tokens, precision=p) for p in PRECISIONS]
    assert [window.precision for window in windows] == list(PRECISIONS)
    for before, after in zip(*(own_routing(window, QUICK.x()) for window in windows), strict=True):
        assert_bitwise_equal(after, before, "routing")
    launches = [launch for group in windows[1]._core.program(0, 7)["groups"] for launch in group["launches"]]
    steps = {launch["step"] for launch in launches if launch["precision"] == "bf16"}
    assert steps == {"experts", "shared"}


def test_other_devices_refuse_bf16() -> None:
    model, emulator = model_of(QUICK), expertile.open_device("emulator", threads=1)
    with pytest.raises(ValueError, match=r"expected exact, as the device is not cpu but emulator, got bf16"):
        expertile.Window(model, emulator, 7, precision="bf16")
    with pytest.raises(ValueError, match=r"expected exact or bf16, got fp8"):
        expertile.Window(model, "cpu", 7, precision="fp8")
    weight, x = operands("Q8_0", 3, 16, 32)
    with pytest.raises(ValueError, match=r"expected precision exact on emulator, got bf16"):
        dense(emulator, x, weight, "bf16")


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_nan_and_ties_of_bf16(instructions: str) -> None:
    """One times a weight: the weight as bf16, rounded to nearest even; NaN stays NaN; activations are not rounded."""
    values = np.array([1.0, 1.00390625, 1.01171875, -1.00390625, 1.0078125, 65504.0, 2.0**-24, np.nan], np.float16)
    n = len(values)
    column = WeightArray("F16", (1, n), values.view(np.uint8).reshape(-1))
    got = dense(device_of(instructions), np.ones((3, 1), np.float16), column, "bf16")
    assert_bitwise_equal(got[:, :-1], np.tile(rounded(values[:-1]).astype(np.float32), (3, 1)), "one times a weight")
    assert np.isnan(got[:, -1]).all()
    one = WeightArray("F16", (1, 1), np.ones(1, np.float16).view(np.uint8))
    got = dense(device_of(instructions), values.reshape(-1, 1), one, "bf16")
    assert_bitwise_equal(got, values.astype(np.float32).reshape(-1, 1), "a value times one")


@pytest.mark.parametrize(
    "command",
    [
        ["parity", "moe", "--preset", "tiny", "--tokens", "9"],
        ["parity", "dense", "--formats", "Q8_0", "--tile", "16,64,32,2"],
        ["prefill", "--synthetic", "tiny", "--layers", "1", "--tokens", "9"],
    ],
    ids=" ".join,
)
def test_commands_name_the_precision(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for precision in PRECISIONS:
        out = tmp_path / "out.json"
        code = cli.main([*command, "--device", "cpu", "--precision", precision, "--json", str(out)])
        document = json.loads(out.read_text())
        assert code == 0 and (precision == "exact" or precision in capsys.readouterr().out)
        named = [document] if command[0] == "prefill" else document["rows"]
        assert {entry["precision"] for entry in named} == {precision}
        if command[0] == "parity":
            far = max(row["rel_l2_exact"] for row in named)
            assert (far > 1e-3) == (precision == "bf16") and far <= BF16_BOUND
    assert cli.main([*command, "--device", "emulator", "--precision", "bf16"]) == 2
