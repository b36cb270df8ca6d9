"""The model of the M5: its counts against the plan's arrays and the engine's programs, and its fit."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from layer_windows import QUICK, model_of

import expertile
from expertile import _core
from expertile.commands import bench_model
from expertile.commands.common import random_routing
from expertile.plan import Plan, make_plan
from expertile.predict import m5
from expertile.predict.m5 import Rates
from expertile.predict.plan_work import MIDDLE_LAUNCH_BLOCKS, plan_launches
from expertile.predict.reported import DIM, FFN, N_EXPERTS, PADDED_ROWS, REPORTED, TILE_ROWS, TOKENS, TOP_K
from expertile.predict.work import Load
from expertile.quants import tensor_bytes

Ids = npt.NDArray[np.int32]


def routing(n_tokens: int, skip: bool = False, zipf: float | None = None) -> tuple[Ids, npt.NDArray[np.float32]]:
    ids, weights = random_routing(n_tokens, N_EXPERTS, TOP_K, 7, zipf)
    if skip:
        ids.ravel()[::3] = -1
        ids[5] = -1
    return ids, weights


CASES = {
    "uniform": routing(300),
    "one block": routing(37),
    "skipped": routing(300, skip=True),
    "zipf": routing(500, zipf=1.1),
}


@pytest.fixture(params=CASES)
def case(request: Any) -> tuple[Ids, Plan, Load]:
    ids, weights = CASES[request.param]
    return ids, make_plan(ids, weights, N_EXPERTS, TILE_ROWS), Load.of(ids, N_EXPERTS, DIM, FFN, TILE_ROWS)


# --- what the kernels state -------------------------------------------------------------------------------------


def test_counts_are_the_plans(case: tuple[Ids, Plan, Load]) -> None:
    ids, plan, load = case
    assert (load.n_rows, load.n_tiles, load.n_kept, load.n_active) == (
        plan.n_rows,
        plan.n_tiles,
        plan.n_kept,
        plan.n_active,
    )
    assert (load.n_blocks, load.n_pairs) == (len(plan.block_count), np.count_nonzero(plan.block_count))
    assert load.max_rows == _core.max_rows(len(ids), TOP_K, N_EXPERTS, TILE_ROWS)
    assert load.n_sources == len({int(token) for token in plan.row_token if token >= 0})


def test_bytes_of_the_plan_are_its_arrays(case: tuple[Ids, Plan, Load]) -> None:
    """Read and written bytes by kernel, from the arrays that each reads and writes."""
    ids, plan, load = case
    flat = ids.ravel()
    kept = flat[flat >= 0]
    weights = 4 * kept.size
    padding = 8 * np.count_nonzero(plan.row_token < 0)
    rows = plan.row_token.nbytes + plan.row_weight.nbytes
    scan = plan.expert_offset.nbytes + plan.tiles.nbytes + plan.meta.nbytes
    counts, offsets = plan.block_count.nbytes, plan.block_offset.nbytes
    named = {(entry // 1024, int(expert)) for entry, expert in enumerate(flat) if expert >= 0}
    looked_up = 4 * len(named) + 4 * len(set(kept.tolist()))
    expected = {
        "mm_clear": (0, 8 * _core.max_rows(len(ids), TOP_K, N_EXPERTS, TILE_ROWS)),
        "mm_hist": (ids.nbytes, counts),
        "mm_scan": (counts, offsets + scan),
        "mm_scan_pad": (counts, offsets + scan + padding),
        "mm_place": (ids.nbytes + weights + looked_up, rows - padding + plan.position.nbytes),
        "mm_place_two_level": (ids.nbytes + weights + looked_up, rows - padding + plan.position.nbytes),
        "mm_onegroup": (ids.nbytes, counts + offsets + scan + padding),
        "mm_scan_blocks": (counts, offsets),
        "mm_place_from_counts": (2 * ids.nbytes + counts, scan + rows + plan.position.nbytes),
        "mm_place_from_offsets": (
            2 * ids.nbytes + counts + 4 * N_EXPERTS,
            scan + rows + plan.position.nbytes,
        ),
        "mm_single": (2 * ids.nbytes, counts + scan + rows + plan.position.nbytes),
    }
    stated = m5.works(load)
    assert {name: (stated[name].read_bytes, stated[name].write_bytes) for name in expected} == expected


def test_serial_place_counts_every_comparison() -> None:
    ids, _ = routing(240, skip=True)  # three blocks
    compares, longest = 0, 0
    for entry, expert in enumerate(ids.ravel()):
        before = entry % 1024 if expert >= 0 else 0
        compares += before
        longest = max(longest, before)
    work = m5.works(Load.of(ids, N_EXPERTS, DIM, FFN, TILE_ROWS))["mm_place"]
    assert work.operations == 2 * compares + 3 * np.count_nonzero(
        ids >= 0
    )  # a compare and an add; three adds at the end
    assert work.shared_steps == longest + 2


def test_bytes_of_the_gather_are_its_rows(case: tuple[Ids, Plan, Load]) -> None:
    _, plan, load = case
    for kernel, dtype in (("mm_gather", np.float32), ("mm_gather_h", np.float16)):
        rows = np.zeros((plan.n_rows, DIM), dtype)
        sources = np.unique(plan.row_token[plan.row_token >= 0]).size * rows[0].nbytes
        work = m5.works(load)[kernel]
        assert (work.read_bytes, work.write_bytes) == (plan.row_token.nbytes + sources, rows.nbytes)
        assert work.threadgroups == plan.n_rows


def test_products_are_counted_tile_by_tile(case: tuple[Ids, Plan, Load]) -> None:
    _, plan, load = case
    stated = m5.works(load)
    flops, read, weights = 0, {"gemm_gate": 0, "gemm_down": 0}, {"gemm_gate": ("IQ2_XS", DIM, FFN)}
    weights["gemm_down"] = ("IQ4_NL", FFN, DIM)
    seen: set[int] = set()
    for expert, _first, real, _ in plan.tiles.tolist():
        flops += 2 * TILE_ROWS * DIM * FFN
        for kernel, (type_name, n_inner, n_cols) in weights.items():
            read[kernel] += 2 * real * n_inner
            if expert not in seen:
                read[kernel] += tensor_bytes(type_name, (n_inner, n_cols))
        seen.add(expert)
    for kernel in read:
        assert (stated[kernel].flops, stated[kernel].read_bytes) == (flops, read[kernel])
        assert stated[kernel].decoded == plan.n_tiles * DIM * FFN
    assert stated["gemm_gate"].write_bytes == 4 * plan.n_kept * FFN
    assert stated["gemm_down"].write_bytes == 4 * plan.n_kept * DIM


def test_the_reported_products_are_201_gflop() -> None:
    row = next(r for r in bench_model.moe_rows(predicted(2048)) if r["step"] == "gemms")
    assert row["tflops_real"] * row["predicted_us"] / 1e3 == pytest.approx(201.3, abs=0.1)
    assert row["tflops_padded"] / row["tflops_real"] == pytest.approx(row["padded_rows"] / 20480)


def test_launches_are_the_engines() -> None:
    """Kernels, their groups and their grids, from the program that a window runs."""
    model = model_of(QUICK)
    for variant in m5.VARIANTS:
        for n_tokens in (QUICK.n_tokens, 2100):
            window = expertile.Window(model, device="cpu", max_tokens=n_tokens, plan=variant)
            groups = [
                [launch for launch in group["launches"] if launch["step"] == "plan"]
                for group in window.program(0, n_tokens)["groups"]
            ]
            groups = [group for group in groups if group]
            ids, _ = random_routing(n_tokens, QUICK.n_experts, QUICK.top_k, 0)
            load = Load.of(ids, QUICK.n_experts, QUICK.dim, QUICK.ffn, TILE_ROWS)
            kernels = [[launch["kernel"] for launch in group] for group in groups]
            assert kernels == plan_launches(variant, load.n_blocks)
            stated = m5.works(load)
            for launch in (launch for group in groups for launch in group):
                assert list(launch["grid"]) == [stated[launch["kernel"]].threadgroups, 1, 1]
    with pytest.raises(ValueError, match="two_dispatch"):
        plan_launches("fastest", 1)


def test_threads_are_the_kernels() -> None:
    table = _core.kernels()
    stated = m5.works(bench_model.random_load(128))
    names = {name: name for name in stated if not name.startswith("gemm_")}
    names |= {name: kernel for name, (_, kernel) in bench_model.GEMM_NAMES.items() if name in stated}
    assert {name: stated[name].threads for name in names} == {n: table[k]["threads"] for n, k in names.items()}


def test_the_middle_launch_starts_where_the_engines_does() -> None:
    model = model_of(QUICK)
    for n_blocks in (MIDDLE_LAUNCH_BLOCKS - 1, MIDDLE_LAUNCH_BLOCKS):
        n_tokens = n_blocks * 1024 // QUICK.top_k
        window = expertile.Window(model, device="cpu", max_tokens=n_tokens, plan="two_dispatch")
        launches = [launch["kernel"] for g in window.program(0, n_tokens)["groups"] for launch in g["launches"]]
        assert ("mm_scan_blocks" in launches) == (n_blocks == MIDDLE_LAUNCH_BLOCKS)
        assert plan_launches("two_dispatch", n_blocks)[1:-1] == [["mm_scan_blocks"]] or n_blocks < MIDDLE_LAUNCH_BLOCKS


def test_reported_padding_is_that_of_uniform_routing_in_tiles_of_16() -> None:
    """Expectation: an expert has a binomial number of rows. The report lies within 3 %; other tiles are far off."""

    def expected(n_tokens: int, tile_rows: int) -> float:
        share, rows = TOP_K / N_EXPERTS, 0.0
        for n in range(n_tokens + 1):
            choose = math.lgamma(n_tokens + 1) - math.lgamma(n + 1) - math.lgamma(n_tokens - n + 1)
            chance = math.exp(choose + n * math.log(share) + (n_tokens - n) * math.log1p(-share))
            rows += chance * -(-n // tile_rows) * tile_rows
        return N_EXPERTS * rows

    for n_tokens, rows in PADDED_ROWS.items():
        assert rows % 16 == 0
        assert rows == pytest.approx(expected(n_tokens, 16), rel=0.03)
        assert bench_model.random_load(n_tokens).n_rows == pytest.approx(expected(n_tokens, 16), rel=0.01)
        assert not any(rows == pytest.approx(expected(n_tokens, tile), rel=0.1) for tile in (32, 64))
    assert any(rows % 32 for rows in PADDED_ROWS.values())


# --- the fit ----------------------------------------------------------------------------------------------------


def loads() -> dict[int, Load]:
    return {count: bench_model.random_load(count) for count in TOKENS}


def predicted(n_tokens: int, rates: Rates | None = None) -> bench_model.Predicted:
    return bench_model.Predicted.of(n_tokens, None, rates or bench_model.fit())


def changed(half: str, factor: float) -> list[Any]:
    return [dataclasses.replace(f, us=f.us * factor) if bench_model.half_of(f.tokens) == half else f for f in REPORTED]


def test_only_the_calibration_half_is_read() -> None:
    rates = m5.calibrate(REPORTED, loads())
    assert m5.calibrate(changed("judged", 3.0), loads()) == rates
    slower = m5.calibrate(changed("calibration", 2.0), loads())
    for count in TOKENS:
        assert (
            predicted(count, slower).times["plan padscan"].us > 1.5 * predicted(count, rates).times["plan padscan"].us
        )
    halves = {
        half: {f.tokens for f in REPORTED if bench_model.half_of(f.tokens) == half}
        for half in ("calibration", "judged")
    }
    assert halves == {"calibration": {512, 2048}, "judged": {128, 1024}}


def test_the_fit_finds_rates_that_are_there() -> None:
    """Figures made by the model itself, from rates far from where the fit starts, are met to a tenth of a percent."""
    true = Rates(
        dispatch_us=1.6, device_step_us=0.25, shared_step_us=0.09, line_us=0.002, in_flight=1500, cache_mb=20,
        decode_gweights=40,
    )  # fmt: skip
    times = {count: m5.predict(load, true) for count, load in loads().items()}
    made = [dataclasses.replace(f, us=times[f.tokens][f.name].us) for f in REPORTED]
    found = m5.calibrate(made, loads())
    for figure in made:
        assert m5.predict(loads()[figure.tokens], found)[figure.name].us == pytest.approx(figure.us, rel=1e-3)


def test_each_bound_is_reached() -> None:
    rates, load = bench_model.fit(), bench_model.random_load(2048)
    bounds = {name: time.bound for name, time in m5.predict(load, rates).items()}
    assert bounds["mm_clear"] == "dispatch"
    assert bounds["mm_place"] == "latency"
    assert bounds["mm_place_two_level"] == "lines"
    assert bounds["mm_gather"] == "memory"
    assert bounds["gemm_gate"] == bounds["layer"] == "arithmetic"


def test_a_bound_costs_what_its_rate_says() -> None:
    """One resource at a time, by hand."""
    rates = Rates(dispatch_us=1, device_step_us=0.5, shared_step_us=0.1, line_us=0.01, in_flight=512, cache_mb=1,
                  decode_gweights=50)  # fmt: skip
    nothing = m5.Work(1, 256, 0, 0, 0, 0, 0, 0)

    def us(**fields: Any) -> float:
        return m5.kernel_time(dataclasses.replace(nothing, **fields), rates).us

    assert us() == 1
    assert us(device_steps=3, shared_steps=10) == pytest.approx(1 + 2.5)
    assert us(device_steps=2, threadgroups=40) == pytest.approx(1 + 2)  # 4 * 256 threads a core, 512 in flight
    assert us(lines=500) == pytest.approx(1 + 5)
    assert us(lines=500, threadgroups=20) == pytest.approx(1 + 0.5)
    assert us(read_bytes=2e6, write_bytes=1e6) == pytest.approx(1 + 2e6 / 153e9 * 1e6)
    assert us(flops=1e9, threadgroups=100) == pytest.approx(1 + 1e9 / 10e12 * 1e6)
    assert us(decoded=1e6, threadgroups=100) == pytest.approx(1 + 1e6 / 500e9 * 1e6)
    assert us(operations=19e6, threadgroups=10) == pytest.approx(1 + 10)
    assert us(device_steps=6, lines=400) == pytest.approx(1 + 5)  # 3 and 4: the root of the squares
