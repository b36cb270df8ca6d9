"""Times the plan, the gather, the epilogues and a layer on the GPU: python3 tests/cuda/measure.py OUT_DIR [STAGE...]

Sizes are the model's (E = 512, K = 10, D = 2560, F = 640, C = 4, R = 320). Times are medians a launch or a layer over a
CUDA graph of 48. Writes plan.json, gather.json and epilogue.json with commit, driver, date and the measured copy
bandwidth. Needs torch, for the copy alone.
"""

from __future__ import annotations

import datetime
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import numpy as np  # noqa: E402

import expertile  # noqa: E402
from expertile import _core  # noqa: E402
from expertile.commands.synth import synthetic  # noqa: E402
from expertile.plan import Plan, make_plan, max_rows  # noqa: E402
from expertile.report_json import envelope, write  # noqa: E402
from expertile.synth import random_streams  # noqa: E402

E, K, D, F, C, R, M = 512, 10, 2560, 640, 4, 320, 16
LAYERS, REPEATS = 48, 30
TOKENS = {
    "plan": (128, 512, 1024, 2048, 4096, 8192, 32768, 131072),
    "gather": (128, 512, 1024, 2048, 4096, 8192, 32768),
    "epilogue": (2048, 128, 8192),
    "layer": (128, 512, 2048, 8192),
}
FORMS = tuple(f"two_dispatch_{form}{parts}" for form in ("counts", "offsets") for parts in ("", "_quarters"))


def routing(n_tokens: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(n_tokens)
    ids = np.empty((n_tokens, K), np.int32)
    for first in range(0, n_tokens, 4096):
        rows = min(4096, n_tokens - first)
        ids[first : first + rows] = np.argpartition(rng.random((rows, E), np.float32), K, axis=1)[:, :K]
    return ids, rng.random((n_tokens, K), np.float32)


def spread(seconds: list[float]) -> dict[str, float]:
    us = np.asarray(seconds) * 1e6
    low, median, high = np.percentile(us, [10, 50, 90])
    return {"us": float(median), "us_p10": float(low), "us_p90": float(high)}


def copy_bandwidth() -> float:
    """GB/s of a device-to-device copy, bytes read and written."""
    import torch

    source = torch.randint(0, 255, (1 << 31,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    del source, target
    torch.cuda.empty_cache()
    return float(2 * (1 << 31) / np.median(times) / 1e9)


def check_peer(row_entry: Any, ids: Any) -> None:
    """The peer's rows hold each entry once, in a place of its expert."""
    entries = row_entry[row_entry < ids.size]
    assert np.array_equal(np.sort(entries), np.arange(ids.size))
    tiles = row_entry.reshape(-1, M)
    experts = np.where(tiles < ids.size, ids.reshape(-1)[np.minimum(tiles, ids.size - 1)], -1)
    first = experts.max(axis=1, keepdims=True)
    assert np.all((experts == first) | (experts == -1))


def plan_rows(gpu: Any, n_tokens: int) -> list[dict[str, Any]]:
    ids, weights = routing(n_tokens)
    want = make_plan(ids, weights, E, M, 10, 40).arrays()
    rows: list[dict[str, Any]] = []
    seconds, row_entry = _core.time_align_peer(gpu, ids, E, M, LAYERS, REPEATS)
    check_peer(row_entry, ids)
    peer = spread(seconds)
    rows.append({"tokens": n_tokens, "variant": "align_atomic", "kernel": "total", **peer})
    for variant in [*_core.plan_variants(), *FORMS]:
        if variant == "single" and n_tokens > 2048:
            continue
        got = _core.run_plan(gpu, variant, ids, weights, E, M)
        for name, array in got.items():
            assert np.array_equal(array.view(np.uint32), want[name].view(np.uint32)), f"{variant}: {name}"
        layers = LAYERS if n_tokens <= 32768 else 8
        repeats = REPEATS if variant not in ("baseline", "onegroup", "single") else 10
        for kernel, times in _core.time_plan(gpu, variant, ids, weights, E, M, layers, repeats).items():
            row = {"tokens": n_tokens, "variant": variant, "kernel": kernel, **spread(times)}
            if kernel == "total":
                row["default"] = variant == _core.default_plan("cuda", n_tokens)
                row |= {"peer": "align_atomic", "peer_us": peer["us"], "ratio": peer["us"] / row["us"]}
            rows.append(row)
    return rows


def time_kernel(gpu: Any, kernel: str, args: bytes, sets: list[list[Any]], grid: list[int]) -> dict[str, float]:
    """Of LAYERS launches that take the sets of buffers in turn, so that no cache serves them; a first run warms up."""
    calls = [(kernel, args, sets[i % len(sets)], [*grid, 1]) for i in range(LAYERS)]
    return spread([seconds / LAYERS for seconds in _core.time_kernels(gpu, calls, 1, REPEATS + 1)[1:]])


def device_plan(gpu: Any, n_tokens: int) -> tuple[Plan, Any]:
    ids, weights = routing(n_tokens)
    plan = make_plan(ids, weights, E, M, 10, 40)
    return plan, {name: gpu.upload(array) for name, array in plan.arrays().items() if array.size}


def gather_rows(gpu: Any, n_tokens: int, copy: float) -> list[dict[str, Any]]:
    plan, arrays = device_plan(gpu, n_tokens)
    rows = []
    bound = max_rows(n_tokens, K, E, M)
    x = np.random.default_rng(1).standard_normal((n_tokens, D), np.float32)
    for kernel, source in (("mm_gather", x), ("mm_gather_h", x.astype(np.float16))):
        into = gpu.alloc(bound * D * source.itemsize)
        buffers = [arrays["meta"], arrays["row_token"], gpu.upload(source), into]
        times = time_kernel(gpu, kernel, struct.pack("<I", D), [buffers], [bound, 1])
        gb_s = 2 * plan.n_rows * D * source.itemsize / times["us"] / 1e3
        row = {"tokens": n_tokens, "kernel": kernel, "padded_rows": plan.n_rows, **times}
        rows.append({**row, "gb_s": gb_s, "peak_fraction": gb_s / copy})
    rows[1]["speedup_over_fp32"] = rows[0]["us"] / rows[1]["us"]
    return rows


VALUES = np.random.default_rng(2).standard_normal(1 << 20, np.float32)


def normal(gpu: Any, *shape: int) -> Any:
    """Repeated: no time depends on the values, and drawing them took longer than all that is measured."""
    return gpu.upload(np.resize(VALUES, shape))


def epilogue_cases(gpu: Any, n_tokens: int) -> list[tuple[str, bytes, Any, list[int], int]]:
    """kernel, args, a maker of one set of buffers, grid, bytes that must move."""
    plan, arrays = device_plan(gpu, n_tokens)
    bound, t = plan.n_rows, n_tokens
    counter = gpu.upload(np.zeros(1, np.uint64))
    element = struct.pack("<IIfI", t, F, 1.0, 0)

    def act() -> list[Any]:
        sides = [normal(gpu, bound, F) for _ in range(2)]
        return [arrays["meta"], arrays["row_token"], *sides, gpu.alloc(bound * F * 2), counter]

    def swiglu() -> list[Any]:
        return [normal(gpu, t, F), normal(gpu, t, F), gpu.alloc(t * F * 2), counter]

    def combine() -> list[Any]:
        y = normal(gpu, plan.n_rows, D)
        return [arrays["position"], arrays["row_weight"], y, gpu.alloc(t * D * 4)]

    def out() -> list[Any]:
        return [*(normal(gpu, t, D) for _ in range(2)), normal(gpu, t), normal(gpu, t, C),
                normal(gpu, t, C, D)]  # fmt: skip

    def both() -> list[Any]:
        return [*combine()[:3], *out()[1:]]

    def norm() -> list[Any]:
        return [normal(gpu, t, C, D), normal(gpu, C * D), gpu.alloc(t * C * D * 2), gpu.alloc(t * C * 4),
                counter]  # fmt: skip

    def down() -> list[Any]:
        return [normal(gpu, t, R), gpu.alloc(t * R * 2), counter]

    chunks, kept = -(-D // 256), t * K
    combine_bytes, out_bytes = kept * D * 4 + t * D * 4, t * D * (2 * 4 + 2 * C * 4)
    cases = [
        ("swiglu_h", element, swiglu, [-(-F // 256), t], t * F * 10),
        ("swiglu_h_v4", element, swiglu, [-(-t * F // 2048), 1], t * F * 10),
        ("act_f16", element, act, [bound, 1], plan.n_kept * F * 8 + plan.n_rows * F * 2),
        ("act_f16_v4", element, act, [bound, 1], plan.n_kept * F * 8 + plan.n_rows * F * 2),
        ("mm_combine", struct.pack("<3I", t, K, D), combine, [chunks, t], combine_bytes),
        ("mm_combine_v4", struct.pack("<3I", t, K, D), combine, [-(-D // 640), t], combine_bytes),
        ("moe_out", struct.pack("<3I", t, C, D), out, [chunks, t], out_bytes),
        ("moe_out_v4", struct.pack("<3I", t, C, D), out, [-(-D // 640), t], out_bytes),
        ("moe_out_combine", struct.pack("<4I", t, K, C, D), both, [chunks, t], combine_bytes + t * D * (8 * C)),
        ("moe_out_combine_v4", struct.pack("<4I", t, K, C, D), both, [-(-D // 640), t],
         combine_bytes + t * D * (8 * C)),
        ("gr_norm_h", struct.pack("<IIIf", t, C, D, 1e-6), norm, [C, t], t * C * D * 6),
        ("gr_epi_down", struct.pack("<IIfI", t, R, float(C), 0), down, [-(-R // 256), t], t * R * 6),
        ("gr_epi_down_v4", struct.pack("<IIfI", t, R, float(C), 0), down, [-(-t * R // 2048), 1], t * R * 6),
    ]  # fmt: skip
    known = set(_core.kernels())
    return [case for case in cases if case[0] in known]


def epilogue_rows(gpu: Any, n_tokens: int, copy: float) -> list[dict[str, Any]]:
    """Each kernel twice: on sets of buffers that together are several times the L2 cache, and on one set again and
    again, as in a layer, where the kernel before has just written what this one reads."""
    rows = []
    for kernel, args, maker, grid, size in epilogue_cases(gpu, n_tokens):
        sets = [maker() for _ in range(max(1, min(24, -(-400_000_000 // size))))]
        for memory, some in (("cold", sets), ("as in a layer", sets[:1])):
            times = time_kernel(gpu, kernel, args, some, grid)
            gb_s = size / times["us"] / 1e3
            row = {"tokens": n_tokens, "kernel": kernel, "memory": memory, **times}
            rows.append({**row, "gb_s": gb_s, "peak_fraction": gb_s / copy})
    return rows


def layer_rows(gpu: Any, n_tokens: int) -> list[dict[str, Any]]:
    """A whole layer of random weights, IQ2_XS gate and up and IQ4_NL down: as one graph, and step by step."""
    model = synthetic("flash-next", 1, None, None, 0)
    x = random_streams(n_tokens, C, D)
    m = 16 if n_tokens <= 1024 else 32 if n_tokens <= 4096 else 64
    tile = (16, 64, 32, 2) if m == 16 else (m, 64, 32, 4)
    rows: list[dict[str, Any]] = []
    options: dict[str, dict[str, Any]] = {
        "layer": {},  # the device's defaults
        "layer, scalar and apart": {"elementwise": "scalar", "fuse": []},
        "layer, vector and apart": {"elementwise": "vector", "fuse": []},
        "layer, swiglu and combine in one": {"fuse": ["swiglu", "combine"]},
        "layer, gatherless and combine in one": {"fuse": ["gatherless", "combine"]},
    }
    for name, some in options.items():
        window = expertile.Window(model, device=gpu, max_tokens=n_tokens, gate_up=tile, down=tile, **some)
        window.moe_layer(0, x)
        seconds = [window._core.moe_layer(0, n_tokens) for _ in range(20)]
        rows.append({"tokens": n_tokens, "kernel": name, "tile": tile, **spread(seconds)})
        del window
    window = expertile.Window(model, device=gpu, max_tokens=n_tokens, gate_up=tile, down=tile, profile=True)
    window.moe_layer(0, x)
    before = window.seconds
    for _ in range(5):
        window._core.moe_layer(0, n_tokens)
    for step, total in window.seconds.items():
        rows.append({"tokens": n_tokens, "kernel": step, "us": (total - before[step]) * 1e6 / 5})
    return rows


def driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()


def run_of() -> dict[str, Any]:
    """Of this run, for the head of a result."""
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    return {"driver": driver(), "date": date}


def show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        name = f"{row.get('variant', '')} {row['kernel']} {row.get('memory', '')}".strip()
        rest = ["the default"] if row.get("default") else []
        rest += [f"{key} {row[key]:.2f}" for key in ("peak_fraction", "ratio", "speedup_over_fp32") if key in row]
        print(f"{row['tokens']:>7} {name:<40} {row['us']:>9.2f} us  {'  '.join(rest)}", flush=True)


def main(arguments: list[str]) -> int:
    out = Path(arguments[0])
    copy = copy_bandwidth()
    print(f"copy {copy:.0f} GB/s")
    gpu = expertile.open_device("cuda")
    top = run_of() | {"copy_gb_s": copy, "layers": LAYERS}
    for stage in arguments[1:] or list(TOKENS):
        rows: list[dict[str, Any]] = []
        for n_tokens in TOKENS[stage]:
            if stage == "plan":
                some = plan_rows(gpu, n_tokens)
            elif stage == "layer":
                some = layer_rows(gpu, n_tokens)
            else:
                some = (gather_rows if stage == "gather" else epilogue_rows)(gpu, n_tokens, copy)
            show(some)
            rows += some
            # After every size: what runs out of time leaves what it has.
            write(out / f"{stage}.json", envelope(f"bench {stage}", True, rows, gpu, top))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
