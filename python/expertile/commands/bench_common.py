"""What the benches share: their options, turns with a peer, accuracy before time, rates and tables."""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expertile import _core, measure, report_json
from expertile.commands.common import (
    NOT_NUMPY,
    CheckFailed,
    not_negative,
    parse_routing,
    positive,
    random_routing,
    show_table,
    spread,
    token_list,
)
from expertile.commands.layer_parity import BF16_BOUND, EXACT_BOUND, FP16_BOUND
from expertile.commands.synth import add_model_options
from expertile.peer.client import PEERS, Peer, find_libraries
from expertile.plan import MAX_EXPERTS
from expertile.synth import PRESETS

SEED = 0
ROUNDS = (5, 60)  # at least, at most: a layer of few tokens takes milliseconds, and a neighbour disturbs it for longer
BUDGET = 6.0  # seconds that the rounds of one line may take, if that is more than the least
SETTLE = 0.01  # between turns: the other's threads go to sleep
PEER_BOUND = 5e-2  # a peer's distance to the exact reference beyond which it did something else (8-bit activations)
Case = tuple[NDArray[np.int32], NDArray[np.float32]]


@dataclass(frozen=True)
class Bounds:
    """What a precision may be off, as relative L2: the whole against fp16 operands, the worst token against exact."""

    fp16: float | None
    exact: float


# What a result of each precision must keep to be timed.
PRECISIONS = {"exact": Bounds(FP16_BOUND, EXACT_BOUND), "bf16": Bounds(None, BF16_BOUND)}

# --- options ----------------------------------------------------------------------------------------------------


def add_common_options(parser: argparse.ArgumentParser, tokens: list[int]) -> None:
    """The options of every bench."""
    text = ",".join(map(str, tokens))
    parser.add_argument(
        "--tokens", type=token_list, default=tokens, metavar="LIST", help=f"T, in turn (default {text})"
    )
    parser.add_argument("--threads", type=not_negative, default=0, metavar="N", help="threads (default: all)")
    parser.add_argument("--csv", metavar="FILE", help="write the rows as CSV")


def add_options(parser: argparse.ArgumentParser, tokens: list[int], routing: bool = True) -> None:
    """The options of every bench that multiplies matrices."""
    add_common_options(parser, tokens)
    if routing:
        parser.add_argument(
            "--routing", default="uniform", metavar="R", help="uniform, zipf:S or a recorded FILE.npz (default uniform)"
        )
    parser.add_argument("--rounds", type=positive, metavar="N", help=f"turns (default {ROUNDS[0]} to {ROUNDS[1]})")
    parser.add_argument(
        "--check-tokens", type=positive, default=8, metavar="N", help="tokens compared with the reference (default 8)"
    )


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """The sizes of a layer: a preset's, or others."""
    add_model_options(parser, "--preset", "sizes (default flash-next)", "flash-next")
    for name, size in (("--experts", "E"), ("--dim", "D"), ("--ffn", "F"), ("--top-k", "K")):
        parser.add_argument(name, type=positive, metavar=size, help="another size than the preset's")


def bench_sizes(arguments: argparse.Namespace) -> dict[str, int]:
    preset = PRESETS[arguments.preset]
    given = {
        "n_experts": arguments.experts,
        "dim": arguments.dim,
        "expert_ffn": arguments.ffn,
        "top_k": arguments.top_k,
    }
    sizes = {name: int(value or preset[name]) for name, value in given.items()}
    if sizes["n_experts"] > MAX_EXPERTS:
        raise ValueError(f"[--experts] expected at most {MAX_EXPERTS}, got {sizes['n_experts']}")
    return sizes


def add_peer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peer", choices=PEERS, help="take turns with ggml's mul_mat_id (extra [peer])")
    parser.add_argument(
        "--peer-lib",
        metavar="DIR",
        help="folder of libggml, libggml-base, libggml-cpu (default: llama-cpp-python's)",
    )


def open_peer(arguments: argparse.Namespace) -> Peer | None:
    """The peer of `--peer`, with as many threads as the device has; None where none is asked for."""
    if arguments.peer is None:
        if arguments.peer_lib is not None:
            raise ValueError("[--peer-lib] expected --peer ggml beside it, got none")
        return None
    return Peer(find_libraries(arguments.peer_lib), thread_count(arguments))


def thread_count(arguments: argparse.Namespace) -> int:
    return int(arguments.threads or report_json.usable_cores())


def bench_routing(text: str, n_tokens: int, n_experts: int, top_k: int) -> Case:
    """ids [T, K] and weights [T, K] of `--routing`. A file holds `ids` [.., K] int32, and maybe `weights` alike."""
    if not text.endswith(".npz"):
        try:
            return random_routing(n_tokens, n_experts, top_k, SEED, parse_routing(text))
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"[--routing] {error}") from None
    ids, weights = recorded_routing(text)
    if len(ids) < n_tokens or ids.shape[1] != top_k:
        raise ValueError(
            f"[--routing] expected at least {n_tokens} tokens of {top_k} experts, got {len(ids)} of {ids.shape[1]}"
        )
    ids = ids[:n_tokens]
    if ids.min() < 0 or ids.max() >= n_experts:
        raise ValueError(f"[--routing] expected ids in 0..{n_experts - 1}, got {ids.min()}..{ids.max()}")
    if weights is None:
        return np.ascontiguousarray(ids, np.int32), np.full(ids.shape, 1 / top_k, np.float32)
    return np.ascontiguousarray(ids, np.int32), np.ascontiguousarray(weights[:n_tokens], np.float32)


def recorded_routing(path: str) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """ids [T, K] of a .npz file, and its weights [T, K] where it has some. Raises ValueError."""
    try:
        with np.load(path) as file:
            arrays = {name: np.asarray(file[name]) for name in ("ids", "weights") if name in file}
            names = ", ".join(file) or "none"
    except (*NOT_NUMPY, TypeError) as error:  # TypeError: a .npy file under this name
        raise ValueError(f"[--routing] expected a .npz file of plain arrays, got {path}: {error}") from error
    if "ids" not in arrays:
        raise ValueError(f"[--routing] expected an array ids in {path}, got {names}")
    ids, weights = arrays["ids"], arrays.get("weights")
    if ids.ndim < 2 or not ids.size or ids.dtype.kind not in "iu":
        raise ValueError(f"[--routing] expected ids of whole numbers [.., K], got {ids.dtype} {list(ids.shape)}")
    if weights is not None and (weights.shape != ids.shape or weights.dtype.kind != "f"):
        raise ValueError(
            f"[--routing] expected weights of floats {list(ids.shape)}, got {weights.dtype} {list(weights.shape)}"
        )
    if weights is not None and not np.isfinite(weights).all():
        raise ValueError(f"[--routing] expected finite weights in {path}, got {weights[~np.isfinite(weights)][0]}")
    flat = ids.reshape(-1, ids.shape[-1])
    return flat, None if weights is None else weights.reshape(flat.shape)


# --- accuracy ---------------------------------------------------------------------------------------------------


def sample(n_tokens: int, count: int) -> NDArray[np.int64]:
    """`count` tokens spread over the chunk, the first and the last among them."""
    return np.unique(np.linspace(0, n_tokens - 1, min(count, n_tokens)).astype(np.int64))


def accuracy(got: Any, fp16: Any, exact: Any) -> dict[str, float]:
    """Distances of some tokens to both references."""
    worst, _ = measure.worst_token_rel_l2(got, exact)
    return {
        "rel_l2_fp16": measure.rel_l2(got, fp16),
        "rel_l2_exact": measure.rel_l2(got, exact),
        "worst_rel_l2_exact": worst,
    }


def require(where: str, row: Mapping[str, Any], whole: Any, precision: str) -> None:
    """Raises CheckFailed for a result that is further off than its precision may be: nothing wrong is timed."""
    bounds = PRECISIONS[precision]
    limits = {"rel_l2_fp16": bounds.fp16, "worst_rel_l2_exact": bounds.exact}
    for name, limit in limits.items():
        if limit is not None and not row[name] <= limit:
            raise CheckFailed(
                f"[{where}] expected {name} of at most {limit:g} ({precision}), got {row[name]:.2e}: not timed"
            )
    if not np.isfinite(whole).all():
        raise CheckFailed(f"[{where}] expected finite results, got {np.count_nonzero(~np.isfinite(whole))} others")


def require_peer(where: str, peer: Any, at: Any, exact: Any, ours: Any) -> dict[str, float]:
    """The peer's distance to the reference on the sampled tokens, and ours to the peer on all of them."""
    found = {"peer_rel_l2_exact": measure.rel_l2(peer[at], exact), "rel_l2_peer": measure.rel_l2(ours, peer)}
    for name, value in found.items():
        if not value <= PEER_BOUND:
            raise CheckFailed(f"[{where}] expected {name} of at most {PEER_BOUND:g}, got {value:.2e}: not timed")
    return found


# --- time -------------------------------------------------------------------------------------------------------


def rounds_for(arguments: argparse.Namespace, seconds: float) -> int:
    """So many turns that they fit the budget, within limits."""
    if arguments.rounds is not None:
        return int(arguments.rounds)
    return int(np.clip(BUDGET / max(seconds, 1e-9), *ROUNDS))


def take_turns(runs: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    """A B A B: what each of `runs` gave in each round. All have run before, so the first round counts."""
    samples: dict[str, list[Any]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            time.sleep(SETTLE)
            samples[name].append(run())
    return samples


def time_calls(device: Any, calls: Sequence[Any], layers: int, precision: str = "exact") -> float:
    """Seconds a layer of kernels that follow one another; a GPU runs them once before."""
    return float(_core.time_kernels(device, list(calls), layers, 1 if on_host(device) else 2, precision)[-1])


def on_host(device: Any) -> bool:
    """Whether the device needs no warm run of a program before it is timed."""
    return device.kind in ("cpu", "emulator")


@dataclass(frozen=True)
class Work:
    """What a step has to do: multiply-adds times two, over real rows and over padded ones, and bytes touched once."""

    flops: float = 0.0
    padded_flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.padded_flops + other.padded_flops, self.bytes + other.bytes)


def product_work(rows: int, padded_rows: int, n_inner: int, n_cols: int, weight_bytes: float) -> Work:
    """A GEMM: compressed weights of the experts used, fp16 rows in, fp32 rows out."""
    flops = 2.0 * n_inner * n_cols
    return Work(flops * rows, flops * padded_rows, weight_bytes + rows * (n_inner * 2 + n_cols * 4))


def time_fields(seconds: Sequence[float], work: Work | None, peak: float | None) -> dict[str, float]:
    """ms with its spread, and the rates of `work` at the median; `peak` in operations a second."""
    row = spread(seconds, "ms", 1e3)
    if work is not None:
        per_second = 1e3 / row["ms"]
        row["tflops_real"] = work.flops * per_second / 1e12
        row["tflops_padded"] = work.padded_flops * per_second / 1e12
        row["gb_s"] = work.bytes * per_second / 1e9
        if peak:
            row["peak_fraction"] = work.flops * per_second / peak
    return row


def peer_fields(row: Mapping[str, Any], name: str, seconds: Sequence[float]) -> dict[str, Any]:
    """The peer's time, and its ratio to ours: above 1 we are ahead."""
    times = spread(seconds, "peer_ms", 1e3)
    return {"peer": name, **times, "ratio": times["peer_ms"] / row["ms"]}


def measured_peak(device: Any, arguments: argparse.Namespace) -> float | None:
    """fp32 multiply-adds of the machine at the bench's threads, in operations a second; None for a GPU."""
    return float(_core.measure_peak(thread_count(arguments))) if device.kind == "cpu" else None


# --- output -----------------------------------------------------------------------------------------------------


def figure(row: Mapping[str, Any], name: str, text: str = "{:.2f}", scale: float = 1.0) -> str:
    return text.format(row[name] * scale) if row.get(name) is not None else "-"


def spread_text(row: Mapping[str, Any], name: str) -> str:
    if name not in row:
        return "-"
    digits = 3 if row[name] < 1 else 2 if row[name] < 100 else 1
    return f"{row[name]:.{digits}f} ({row[name + '_p10']:.{digits}f}-{row[name + '_p90']:.{digits}f})"


def show_products(rows: Sequence[Mapping[str, Any]], heads: Mapping[str, str], title: str) -> None:
    """A line a row: what names it (`heads`: field -> column), its times, its rates, the peer's, and both errors."""
    peers = any("peer" in row for row in rows)
    columns = [*heads.values(), "ms (p10-p90)", "TFLOP/s", "padded", "GB/s", "% peak"]
    columns += [f"{next(row['peer'] for row in rows if 'peer' in row)} ms", "ratio"] if peers else []
    columns += ["error", "worst token"] + (["peer's error"] if peers else [])
    lines = []
    for row in rows:
        line = [row.get(name, "-") for name in heads]
        line += [spread_text(row, "ms"), figure(row, "tflops_real", "{:.3g}"), figure(row, "tflops_padded", "{:.3g}")]
        line += [figure(row, "gb_s"), figure(row, "peak_fraction", "{:.1f}", 100)]
        line += [spread_text(row, "peer_ms"), figure(row, "ratio")] if peers else []
        line += [figure(row, "rel_l2_exact", "{:.1e}"), figure(row, "worst_rel_l2_exact", "{:.1e}")]
        line += [figure(row, "peer_rel_l2_exact", "{:.1e}")] if peers else []
        lines.append(line)
    show_table(columns, lines, title)


def write_csv(path: str | None, rows: Sequence[Mapping[str, Any]]) -> None:
    """The rows' fields in the order of their first appearance."""
    if path is None:
        return
    fields = list(dict.fromkeys(key for row in rows for key in row))
    with Path(path).open("w", newline="") as file:
        writer = csv.DictWriter(file, fields, restval="")
        writer.writeheader()
        writer.writerows(rows)
