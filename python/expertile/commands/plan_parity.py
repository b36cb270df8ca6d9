"""`expertile parity plan`: every array of every variant, and the gathered rows, byte for byte on every device."""

from __future__ import annotations

import argparse
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expertile import _core, reference
from expertile.commands.common import (
    finish,
    open_device,
    present_kinds,
    random_routing,
    say,
    show_table,
)
from expertile.plan import make_plan

POISONS = (0xDEADBEEF, 777777)
PLAN_COLUMNS = (10, 40)  # of gate/up and down, in the grids that `_core.run_plan` writes
PLAN_ARRAYS = (
    "meta",
    "block_count",
    "block_offset",
    "expert_offset",
    "tiles",
    "row_token",
    "row_weight",
    "position",
)
SEED = 0
GATHERS = ("rows_fp32", "rows_fp16")
Routing = tuple[NDArray[np.int32], NDArray[np.float32]]


@dataclass(frozen=True)
class PlanCase:
    """Entries to sort."""

    name: str
    n_experts: int
    tile_rows: int
    ids: NDArray[np.int32]
    weights: NDArray[np.float32]


def plan_reference(ids: Any, weights: Any, n_experts: int, tile_rows: int) -> dict[str, Any]:
    """The reference's arrays by name, with the column tiles that `_core.run_plan` puts into meta."""
    plan = make_plan(ids, weights, n_experts, tile_rows, *PLAN_COLUMNS, _skip_unknown=True)
    return dict(plan.arrays())


def skip_some(routing: Routing) -> Routing:
    """Every third entry skipped."""
    ids = routing[0].copy()
    ids.reshape(-1)[::3] = -1
    return ids, routing[1]


def plan_cases(tokens: list[int] | None, seed: int) -> Iterator[PlanCase]:
    """The usual sizes with and without skipped entries, then, unless `tokens` is given, the odd ones."""
    for n_tokens in tokens or [128, 512, 1024, 2048]:
        routing = random_routing(n_tokens, 512, 10, seed)
        yield PlanCase(f"T={n_tokens}", 512, 16, *routing)
        yield PlanCase(f"T={n_tokens} skips", 512, 16, *skip_some(routing))
    if tokens is not None:
        return
    for top_k in (1, 2, 3, 5, 7, 8, 9, 10, 11, 12, 16, 22, 32):
        routing = random_routing(67, 64, top_k, seed + top_k)
        yield PlanCase(f"K={top_k}", 64, 32, *(skip_some(routing) if top_k % 2 else routing))
    for n_experts in (1, 5, 33, 128, 256, 512, 513, 1023, 1024, 1025, 2048, 4096):
        routing = random_routing(129, n_experts, min(8, n_experts), seed + n_experts)
        yield PlanCase(f"E={n_experts}", n_experts, 16, *routing)
    for n_tokens in (1, 2, 3, 15, 16, 17, 31, 32, 33, 255, 256, 257):
        routing = random_routing(n_tokens, 40, 4, seed + n_tokens)
        yield PlanCase(f"T={n_tokens} E=40", 40, 16, *(skip_some(routing) if n_tokens % 2 else routing))
    yield from special_cases()


def special_cases() -> Iterator[PlanCase]:
    """Entries that plans of this kind have got wrong."""
    third = np.float32(1 / 3)
    yield PlanCase("one skipped", 8, 16, np.array([[-1, 3]], np.int32), np.array([[third, third]], np.float32))
    yield PlanCase(
        "one expert in all slots", 16, 16, np.full((40, 8), 5, np.int32), np.full((40, 8), third, np.float32)
    )
    yield PlanCase("all skipped", 16, 16, np.full((70, 3), -1, np.int32), np.full((70, 3), third, np.float32))
    each = np.arange(512, dtype=np.int32)[::-1, None].copy()
    yield PlanCase("one token each", 512, 64, each, np.full((512, 1), third, np.float32))
    outside = random_routing(100, 64, 6, 1)[0]
    outside[::7, 2], outside[::5, 4], outside[3, 0] = 64, -2, np.iinfo(np.int32).max
    yield PlanCase("ids out of range", 64, 16, outside, np.full((100, 6), third, np.float32))
    many = np.full((70_000, 1), 3, np.int32)
    yield PlanCase("T=70000, one expert", 8, 64, many, np.linspace(0, 1, 70_000, dtype=np.float32)[:, None])


def differing_bytes(got: dict[str, Any], expected: dict[str, Any]) -> dict[str, int]:
    """Differing bytes of each array that both have; one of another shape or type differs in all its bytes."""
    counts = {}
    for name in PLAN_ARRAYS:
        if name not in got or name not in expected:
            continue
        a, b = np.asarray(got[name]), np.asarray(expected[name])
        if a.shape != b.shape or a.dtype != b.dtype:
            counts[name] = max(a.nbytes, b.nbytes, 1)
        else:
            counts[name] = byte_difference(a, b)
    return counts


def byte_difference(a: NDArray[Any], b: NDArray[Any]) -> int:
    left, right = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (a, b))
    return int(np.count_nonzero(left != right))


def run_gather(device: Any, kernel: str, x: NDArray[Any], plan: dict[str, Any]) -> tuple[NDArray[Any], float]:
    """One gather of x's rows by the plan, into a poisoned array; the rows and the device's seconds."""
    rows = np.full((len(plan["row_token"]), x.shape[1]), np.nan, x.dtype)
    if not len(rows):
        return rows, 0.0
    arguments = struct.pack("<I", x.shape[1])
    seconds = _core.run_kernel(device, kernel, arguments, [plan["meta"], plan["row_token"], x, rows], [len(rows), 1, 1])
    return rows, float(seconds)


def gather_difference(device: Any, case: PlanCase, expected: dict[str, Any]) -> dict[str, int]:
    """Differing bytes of the gathered rows, fp32 and fp16."""
    generator = np.random.default_rng(len(case.ids))
    x = generator.standard_normal((len(case.ids), 40), np.float32)
    counts = {}
    for name, kernel, source in (("rows_fp32", "mm_gather", x), ("rows_fp16", "mm_gather_h", x.astype(np.float16))):
        got, _ = run_gather(device, kernel, source, expected)
        counts[name] = byte_difference(got, reference.gather(source, expected["row_token"]))
    return counts


def run_plan(arguments: argparse.Namespace) -> int:
    """Every case on every device by every variant, with either poison."""
    devices = [open_device(kind) for kind in present_kinds(arguments.device)]
    rows: list[dict[str, Any]] = []
    totals: dict[tuple[str, str], dict[str, int]] = {}
    n_cases = 0
    for case in plan_cases(arguments.tokens, SEED):
        n_cases += 1
        expected = plan_reference(case.ids, case.weights, case.n_experts, case.tile_rows)
        for device in devices:
            for variant in _core.plan_variants():
                counts = plan_counts(device, variant, case, expected)
                collect(rows, totals, case, device.kind, variant, counts)
            collect(rows, totals, case, device.kind, "gather", gather_difference(device, case, expected))
    heads = [*PLAN_ARRAYS, *GATHERS]
    show_table(
        ["device", "variant", *heads],
        [[kind, variant, *(counts.get(name, "-") for name in heads)] for (kind, variant), counts in totals.items()],
        f"differing bytes against the reference, {n_cases} cases, buffers poisoned with 0xDEADBEEF and with 777777",
    )
    wrong = [row for row in rows if row["differing_bytes"]]
    for row in wrong[:20]:
        where = f"{row['case']} (E={row['experts']}, K={row['top_k']}, M={row['tile_rows']})"
        say(f"{row['device']} {row['variant']} {where}: {row['array']} differs in {row['differing_bytes']} bytes")
    say(f"FAIL: {len(wrong)} arrays differ" if wrong else "PASS")
    return finish(arguments, "parity plan", not wrong, rows, devices[0] if len(devices) == 1 else None)


def plan_counts(device: Any, variant: str, case: PlanCase, expected: dict[str, Any]) -> dict[str, int]:
    """Differing bytes of the variant's arrays: the worse of the two poisons."""
    worst: dict[str, int] = {}
    for poison in POISONS:
        got = _core.run_plan(device, variant, case.ids, case.weights, case.n_experts, case.tile_rows, poison)
        for name, count in differing_bytes(got, expected).items():
            worst[name] = max(worst.get(name, 0), count)
    return worst


def collect(
    rows: list[dict[str, Any]],
    totals: dict[tuple[str, str], dict[str, int]],
    case: PlanCase,
    kind: str,
    variant: str,
    counts: dict[str, int],
) -> None:
    total = totals.setdefault((kind, variant), {})
    for name, count in counts.items():
        total[name] = total.get(name, 0) + count
        rows.append(
            {
                "case": case.name,
                "tokens": case.ids.shape[0],
                "experts": case.n_experts,
                "top_k": case.ids.shape[1],
                "tile_rows": case.tile_rows,
                "device": kind,
                "against": "reference",
                "variant": variant,
                "array": name,
                "differing_bytes": count,
            }
        )
