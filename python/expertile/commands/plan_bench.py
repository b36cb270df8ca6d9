"""`expertile bench plan` and `bench gather`: medians per layer, for every variant, beside peers on the host.

Nothing is timed whose result is wrong: each variant's arrays are first compared with the reference, byte for byte.
Ours and the peers take turns, round by round, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expertile import _core
from expertile.commands.bench_common import add_common_options, write_csv
from expertile.commands.common import (
    CheckFailed,
    add_command,
    finish,
    open_device,
    parse_routing,
    positive,
    random_routing,
    show_table,
    spread,
    word_list,
)
from expertile.commands.plan_parity import differing_bytes, plan_reference, run_gather
from expertile.plan import argsort_plan

DEFAULT_TOKENS = [128, 512, 1024, 2048]
POISON = 0xDEADBEEF
# What is measured: the model class's layer, and so many samples a figure.
N_EXPERTS, TOP_K, DIM, TILE_ROWS = 512, 10, 2560, 16
ROUNDS = 15
SEED = 0
# Column heads of the kernels that every plan shares; another kernel's head is its name without mm_.
HEADS = {
    "mm_clear": "clear",
    "mm_hist": "hist",
    "mm_scan": "scan",
    "mm_scan_pad": "scan + pad clear",
    "mm_place": "place serial",
    "mm_place_two_level": "place two-level",
}


def add(stages: Any) -> None:
    plan = add_command(stages, "plan", run_plan_bench, "every variant of the plan, kernel by kernel")
    plan.add_argument("--variants", type=word_list, metavar="LIST", help="variants (default: all of the device)")
    gather = add_command(stages, "gather", run_gather_bench, "the rows' gather in fp32 and fp16")
    for stage in (plan, gather):
        add_common_options(stage, DEFAULT_TOKENS)
        stage.add_argument(
            "--routing", type=parse_routing, default=None, metavar="R", help="uniform or zipf:S (default uniform)"
        )
    plan.add_argument("--layers", type=positive, default=48, metavar="N", help="layers in a sample (default 48)")


def routing_text(zipf: float | None) -> str:
    return "uniform" if zipf is None else f"zipf:{zipf:g}"


# --- plan -------------------------------------------------------------------------------------------------------


def check_plan(device: Any, variant: str, routing: tuple[Any, Any], n_experts: int, tile_rows: int) -> dict[str, Any]:
    """Raises CheckFailed unless the variant's arrays are the reference's; returns the reference."""
    ids, weights = routing
    expected = plan_reference(ids, weights, n_experts, tile_rows)
    got = _core.run_plan(device, variant, ids, weights, n_experts, tile_rows, POISON)
    wrong = {name: count for name, count in differing_bytes(got, expected).items() if count}
    if wrong:
        raise CheckFailed(f"[bench plan] expected {variant} equal to the reference, got differing bytes {wrong}")
    return expected


def time_variants(
    device: Any, variants: list[str], ids: Any, weights: Any, arguments: argparse.Namespace
) -> tuple[dict[str, dict[str, list[float]]], dict[str, list[float]]]:
    """Seconds a layer by variant and kernel, and by peer; the first round warms up and is dropped."""
    ours: dict[str, dict[str, list[float]]] = {variant: {} for variant in variants}
    peers: dict[str, list[float]] = {"numpy": [], "counting sort": []}
    for number in range(ROUNDS + 1):
        for variant in variants:
            sample = _core.time_plan(device, variant, ids, weights, N_EXPERTS, TILE_ROWS, arguments.layers, 1)
            for kernel, seconds in sample.items():
                ours[variant].setdefault(kernel, []).extend(seconds if number else [])
        began = time.perf_counter()
        argsort_plan(ids, weights, N_EXPERTS, TILE_ROWS)
        peers["numpy"] += [time.perf_counter() - began] if number else []
        seconds, _ = _core.time_plan_peer(ids, N_EXPERTS, TILE_ROWS, 3)
        peers["counting sort"] += [float(np.median(seconds))] if number else []
    return ours, peers


def run_plan_bench(arguments: argparse.Namespace) -> int:
    """Prints the table of kernels, then the rows as they go into the JSON."""
    device = open_device(arguments.device, arguments.threads)
    known = list(_core.plan_variants())
    variants = arguments.variants or known
    for variant in variants:
        if variant not in known:
            raise ValueError(f"[--variants] expected some of {', '.join(known)}, got {variant}")
    rows: list[dict[str, Any]] = []
    for n_tokens in arguments.tokens:
        ids, weights = random_routing(n_tokens, N_EXPERTS, TOP_K, SEED, arguments.routing)
        for variant in variants:
            expected = check_plan(device, variant, (ids, weights), N_EXPERTS, TILE_ROWS)
        n_rows = int(expected["meta"][0])
        common = {
            "tokens": n_tokens,
            "device": device.kind,
            "routing": routing_text(arguments.routing),
            "blocks": -(-n_tokens * TOP_K // 1024),
            "padded_rows": n_rows,
            "padded_ratio": n_rows / (n_tokens * TOP_K),
        }
        ours, peers = time_variants(device, variants, ids, weights, arguments)
        rows += plan_rows(common, ours, peers, n_tokens * TOP_K)
    show_plan(rows, variants)
    write_csv(arguments.csv, rows)
    return finish(arguments, "bench plan", True, rows, device, {"layers": arguments.layers, "rounds": ROUNDS})


def plan_rows(
    common: dict[str, Any], ours: dict[str, dict[str, list[float]]], peers: dict[str, list[float]], n_entries: int
) -> list[dict[str, Any]]:
    """A row a kernel; the total once for each peer, with the ratio of its time to ours."""
    rows = []
    base = float(np.median(ours["baseline"]["total"])) if "baseline" in ours else None
    for variant, kernels in ours.items():
        for kernel, seconds in kernels.items():
            row = {**common, "variant": variant, "kernel": kernel, **spread(seconds, "us", 1e6)}
            if kernel != "total":
                rows.append(row)
                continue
            row["ns_an_entry"] = row["us"] * 1e3 / n_entries
            if base is not None:
                row["speedup"] = base * 1e6 / row["us"]
            for peer, samples in peers.items():
                times = spread(samples, "peer_us", 1e6)
                rows.append({**row, "peer": peer, **times, "ratio": times["peer_us"] / row["us"]})
    return rows


def show_plan(rows: list[dict[str, Any]], variants: list[str]) -> None:
    """One line a T: kernels as they first appear among the variants, then whole plans, then the peers."""
    kernels: dict[tuple[str, str], str] = {}
    for row in rows:
        name = row["kernel"]
        if name != "total" and name not in (kernel for _, kernel in kernels):
            kernels[row["variant"], name] = HEADS.get(name, name.removeprefix("mm_").replace("_", " "))
    peers = list(dict.fromkeys(row["peer"] for row in rows if "peer" in row))
    heads = ["T", "blocks", "padded rows", "padded/real", *kernels.values()]
    heads += [f"plan {variant}" for variant in variants] + peers
    lines, detail = [], []
    for n_tokens in dict.fromkeys(row["tokens"] for row in rows):
        some = [row for row in rows if row["tokens"] == n_tokens]
        by_kernel = {(row["variant"], row["kernel"]): row for row in some}
        by_peer = {row["peer"]: row for row in some if "peer" in row}
        line = [n_tokens, some[0]["blocks"], f"{some[0]['padded_rows']:,}", f"{some[0]['padded_ratio']:.2f}"]
        line += [f"{by_kernel[key]['us']:.2f}" if key in by_kernel else "-" for key in kernels]
        line += [f"{by_kernel[variant, 'total']['us']:.2f}" for variant in variants]
        lines.append(line + [f"{by_peer[peer]['peer_us']:.1f}" for peer in peers])
        detail += [plan_line(by_kernel[variant, "total"], some) for variant in variants]
    show_table(heads, lines, "microseconds a layer, median")
    show_table(
        ["T", "variant", "us (p10-p90)", "ns an entry", "speedup", *(f"ratio to {peer}" for peer in peers)],
        detail,
        "\nwhole plan; speedup over baseline; ratio = the peer's time over ours",
    )


def plan_line(row: dict[str, Any], rows: list[dict[str, Any]]) -> list[Any]:
    ratios = [
        f"{other['ratio']:.2f}" for other in rows if other["variant"] == row["variant"] and other["kernel"] == "total"
    ]
    spread_text = f"{row['us']:.2f} ({row['us_p10']:.2f}-{row['us_p90']:.2f})"
    speedup = f"{row['speedup']:.2f}x" if "speedup" in row else "-"
    return [row["tokens"], row["variant"], spread_text, f"{row['ns_an_entry']:.2f}", speedup, *ratios]


# --- gather -----------------------------------------------------------------------------------------------------


def run_gather_bench(arguments: argparse.Namespace) -> int:
    """fp32 and fp16 rows of the same plan, beside numpy's take."""
    device = open_device(arguments.device, arguments.threads)
    rows: list[dict[str, Any]] = []
    for n_tokens in arguments.tokens:
        ids, weights = random_routing(n_tokens, N_EXPERTS, TOP_K, SEED, arguments.routing)
        plan = plan_reference(ids, weights, N_EXPERTS, TILE_ROWS)
        x = np.random.default_rng(SEED).standard_normal((n_tokens, DIM), np.float32)
        for kernel, source in (("mm_gather", x), ("mm_gather_h", x.astype(np.float16))):
            rows.append(gather_row(device, kernel, source, plan, arguments))
    show_table(
        ["T", "kernel", "padded rows", "us (p10-p90)", "GB/s", "numpy take us", "ratio"],
        [
            [
                row["tokens"],
                row["kernel"],
                f"{row['padded_rows']:,}",
                f"{row['us']:.1f} ({row['us_p10']:.1f}-{row['us_p90']:.1f})",
                f"{row['gb_s']:.2f}",
                f"{row['peer_us']:.1f}",
                f"{row['ratio']:.2f}",
            ]
            for row in rows
        ],
        "bytes = padded rows read and written; ratio = numpy's time over ours",
    )
    write_csv(arguments.csv, rows)
    return finish(arguments, "bench gather", True, rows, device, {"rounds": ROUNDS, "dim": DIM})


def gather_row(
    device: Any, kernel: str, x: NDArray[Any], plan: dict[str, Any], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Checks one gather against the reference, then times it and numpy's take in turns."""
    n_rows = int(plan["meta"][0])
    row_token = plan["row_token"][:n_rows]
    expected = np.where((row_token >= 0)[:, None], x[np.maximum(row_token, 0)], x.dtype.type(0))
    got, _ = run_gather(device, kernel, x, plan)
    if got.tobytes() != expected.tobytes():
        raise CheckFailed(f"[bench gather] expected {kernel} equal to the reference, got other bytes")
    seconds: list[float] = []
    peer: list[float] = []
    into = np.empty_like(expected)
    source = np.maximum(row_token, 0).astype(np.int64)
    for number in range(ROUNDS + 1):
        _, sample = run_gather(device, kernel, x, plan)
        began = time.perf_counter()
        np.take(x, source, axis=0, out=into, mode="clip")
        if number:
            peer.append(time.perf_counter() - began)
            seconds.append(sample)
    row: dict[str, Any] = {
        "tokens": x.shape[0],
        "device": device.kind,
        "kernel": kernel,
        "routing": routing_text(arguments.routing),
        "padded_rows": n_rows,
        **spread(seconds, "us", 1e6),
        "peer": "numpy",
        **spread(peer, "peer_us", 1e6),
    }
    row["gb_s"] = 2 * n_rows * x.shape[1] * x.itemsize / row["us"] / 1e3
    row["ratio"] = row["peer_us"] / row["us"]
    return row
