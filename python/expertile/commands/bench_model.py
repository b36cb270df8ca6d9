"""`expertile bench plan|gather|moe --model m5`: predicted times beside reported ones, without any device.

A prediction is no measurement, and every table says so. The model is calibrated on the figures of half of the reported
token counts and judged on the other half; both errors are shown, and those of the halves exchanged.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

from expertile.commands.bench_common import write_csv
from expertile.commands.common import (
    finish,
    parse_routing,
    random_routing,
    say,
    show_table,
)
from expertile.predict import m5
from expertile.predict.m5 import Rates, Time
from expertile.predict.plan_work import plan_launches
from expertile.predict.reported import (
    DIM,
    FFN,
    N_EXPERTS,
    PADDED_ROWS,
    REPORTED,
    TILE_ROWS,
    TOKENS,
    TOP_K,
    disagreements,
    find,
)
from expertile.predict.work import Load, Work

MODELS = ("m5",)
# What a prediction heeds of a stage's options, and what the parsers add.
OPTIONS = {"model", "tokens", "routing", "variants", "json", "csv", "command", "stage", "run"}
SEED = 0
TILES = (16, 32, 64)
EXCHANGED = tuple(count for count in TOKENS if count not in m5.CALIBRATION)
# Reported without a T: shown beside the predictions, in no error.
UNPLACED = {"plan": {"mm_onegroup": "8.27 to 11.59"}, "moe": {"act_f16_v4": "558.5"}}
SLOW_MULTIPLY, FAST_MULTIPLY = 0.7, 1.3  # TFLOP/s of a core, as published
GEMM_NAMES = {
    "gemm_gate": ("gate", "gemm_grouped_iq2_xs_16_32_32_4"),
    "gemm_up": ("up", "gemm_grouped_iq2_xs_16_32_32_4"),
    "gemm_down": ("down", "gemm_grouped_iq4_nl_16_64_32_2"),
}
# What `bench moe` shows of a layer, as m5.predict names it.
LAYER = (
    "plan baseline",
    "plan padscan",
    "plan two_dispatch",
    "mm_gather",
    "mm_gather_h",
    *GEMM_NAMES,
    "gemms",
    "act_f16_v4",
    "mm_combine_v4",
    "layer before",
    "layer after",
    "layer",
)
Row = dict[str, Any]


def model_name(text: str) -> str:
    if text not in MODELS:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(MODELS)}, got {text!r}")
    return text


def add(stages: Any) -> None:
    """`--model` for the stages that can be predicted."""
    for stage in ("plan", "gather", "moe"):
        add_model_option(stages.choices[stage])


def add_model_option(parser: argparse.ArgumentParser) -> None:
    """A parser that measures predicts instead where `--model` is given."""
    measure: Callable[[argparse.Namespace], int] = parser.get_default("run")
    tokens = parser.get_default("tokens")
    parser.add_argument("--model", type=model_name, metavar="NAME", help="predict instead of measuring: m5")

    def run(arguments: argparse.Namespace) -> int:
        if arguments.model is None:
            return measure(arguments)
        for name, value in vars(arguments).items():
            if name not in OPTIONS and value != parser.get_default(name):
                raise ValueError(f"[--{name.replace('_', '-')}] expected no such option beside --model, got {value}")
        if arguments.tokens is tokens:
            arguments.tokens = list(TOKENS)
        return run_model(arguments)

    parser.set_defaults(run=run)


# --- the model --------------------------------------------------------------------------------------------------


@lru_cache(maxsize=32)
def random_load(n_tokens: int, zipf: float | None = None, tile_rows: int = TILE_ROWS) -> Load:
    """The routing that the benches measure, in the sizes of the reported figures."""
    ids, _ = random_routing(n_tokens, N_EXPERTS, TOP_K, SEED, zipf)
    return Load.of(ids, N_EXPERTS, DIM, FFN, tile_rows)


@lru_cache(maxsize=8)
def fit(tokens: tuple[int, ...] = m5.CALIBRATION, given: Rates | None = None) -> Rates:
    return m5.calibrate(REPORTED, {count: random_load(count) for count in tokens}, tokens, given)


def half_of(tokens: int) -> str:
    return "calibration" if tokens in m5.CALIBRATION else "judged"


@dataclass(frozen=True)
class Predicted:
    """All of one T."""

    load: Load
    works: dict[str, Work]
    times: dict[str, Time]
    routing: float | None

    @classmethod
    def of(cls, n_tokens: int, routing: float | None, rates: Rates) -> Predicted:
        load = random_load(n_tokens, routing)
        works = m5.works(load)
        return cls(load, works, m5.predict(load, rates, works), routing)

    def row(self, name: str, table: str, **fields: Any) -> Row:
        """One prediction beside its figure of `table`; figures are of uniform routing."""
        time, work = self.times[name], self.works.get("gemm_gate" if name == "gemm_up" else name)
        reported = find(REPORTED, table, name, self.load.n_tokens) if self.routing is None else None
        row: Row = {
            "tokens": self.load.n_tokens,
            "device": "m5",
            "routing": "uniform" if self.routing is None else f"zipf:{self.routing:g}",
            "blocks": self.load.n_blocks,
            "padded_rows": self.load.n_rows,
            **fields,
            "predicted_us": time.us,
            "bound": time.bound,
            "reported_us": reported,
            "error_percent": None if reported is None else 100 * (time.us / reported - 1),
            "half": None if reported is None else half_of(self.load.n_tokens),
        }
        return row if work is None else {**row, **asdict(work)}


def plan_rows(of: Predicted, variants: Sequence[str]) -> list[Row]:
    """The kernels of the variants, each once, then the whole plans."""
    launches = [kernel for v in variants for group in plan_launches(v, of.load.n_blocks) for kernel in group]
    rows = [of.row(kernel, "kernels", kernel=kernel) for kernel in dict.fromkeys(launches)]
    return rows + [of.row(f"plan {v}", "kernels", variant=v, kernel="total") for v in variants]


def moe_rows(of: Predicted) -> list[Row]:
    """The steps of one layer, in the forms before (baseline, fp32 rows), after (padscan, fp16 rows) and ours."""
    rows = []
    for name in LAYER:
        step, kernel = GEMM_NAMES.get(name, (name, "total" if name.split()[0] in ("plan", "layer", "gemms") else name))
        row = of.row(name, "text" if name == "gemms" else "end to end", step=step, kernel=kernel)
        if name == "gemms":
            flops = 2 * 3 * DIM * FFN
            row["tflops_real"] = flops * of.load.n_kept / row["predicted_us"] / 1e6
            row["tflops_padded"] = flops * of.load.n_rows / row["predicted_us"] / 1e6
        rows.append(row)
    return rows


def tile_table(tokens: Sequence[int], routing: float | None, rates: Rates) -> list[Row]:
    """The products with tiles of 16, 32 and 64 rows, for the whole range of what a core is said to multiply."""
    slow, fast = (fit(given=replace(Rates(), multiply_tflops=speed)) for speed in (SLOW_MULTIPLY, FAST_MULTIPLY))
    rows = []
    for n_tokens in tokens:
        for tile in TILES:
            load = random_load(n_tokens, routing, tile)
            us, *ends = (m5.predict(load, some)["gemms"].us for some in (rates, slow, fast))
            row = {"tokens": n_tokens, "device": "m5", "step": "gemms", "kernel": "by tile", "tile_rows": tile}
            row |= {"tiles": load.n_tiles, "padded_rows": load.n_rows, "predicted_us": us}
            rows.append({**row, "predicted_us_low": min(ends), "predicted_us_high": max(ends)})
    return rows


# --- the command ------------------------------------------------------------------------------------------------


def stage_rows(stage: str, of: Predicted, variants: Sequence[str]) -> list[Row]:
    if stage == "plan":
        return plan_rows(of, variants)
    if stage == "gather":
        return [of.row(kernel, "end to end", kernel=kernel) for kernel in ("mm_gather", "mm_gather_h")]
    return moe_rows(of)


def run_model(arguments: argparse.Namespace) -> int:
    """Predicts the stage; nothing is run on any device."""
    stage, tokens = arguments.stage, arguments.tokens
    variants = getattr(arguments, "variants", None) or list(m5.VARIANTS)
    routing = routing_power(arguments.routing)
    rates, other = fit(), fit(EXCHANGED)

    def rows_with(some: Rates) -> list[Row]:
        return [row for count in tokens for row in stage_rows(stage, Predicted.of(count, routing, some), variants)]

    rows = rows_with(rates)
    errors = {half: summary(row for row in rows if row["half"] == half) for half in ("calibration", "judged")}
    errors["exchanged"] = summary(row for row in rows_with(other) if row["half"] == "calibration")
    show_rows(rows)
    tiles = tile_table(tokens, routing, rates) if stage == "moe" else []
    if tiles:
        show_tiles(tiles)
    show_errors(errors)
    show_notes(stage, rates)
    write_csv(arguments.csv, rows + tiles)
    top = {"model": arguments.model, "prediction": True, "rates": asdict(rates), "fitted": list(m5.FITTED)}
    return finish(arguments, f"bench {stage}", True, rows + tiles, None, {**top, "errors": errors})


def routing_power(routing: Any) -> float | None:
    """As the stage's parser left it: parsed, or the text."""
    try:
        return parse_routing(routing) if isinstance(routing, str) else routing
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"[--routing] {error}") from None


def label(row: Row) -> str:
    if "step" in row:
        return str(row["step"])
    return f"plan {row['variant']}" if row["kernel"] == "total" else str(row["kernel"])


def summary(rows: Iterable[Row]) -> Row:
    """How many figures, their mean error without its sign, and the worst."""
    some = [row for row in rows if row["error_percent"] is not None]
    if not some:
        return {"figures": 0, "mean_percent": None, "worst_percent": None, "worst": None}
    worst = max(some, key=lambda row: abs(row["error_percent"]))
    return {
        "figures": len(some),
        "mean_percent": sum(abs(row["error_percent"]) for row in some) / len(some),
        "worst_percent": worst["error_percent"],
        "worst": f"{label(worst)} at T = {worst['tokens']}",
    }


# --- what is printed --------------------------------------------------------------------------------------------


def figure(us: float | None) -> str:
    return "-" if us is None else f"{us:,.2f}" if us < 100 else f"{us:,.1f}" if us < 10_000 else f"{us:,.0f}"


def show_rows(rows: Sequence[Row]) -> None:
    lines = []
    for row in rows:
        stated = ["", "", "", ""]
        if "read_bytes" in row:
            work = [f"{row['read_bytes'] + row['write_bytes']:,.0f}", f"{row['operations'] + row['flops']:,.0f}"]
            stated = [*work, f"{row['device_steps']:.3g}", f"{row['shared_steps']:.0f}"]
        error = "-" if row["error_percent"] is None else f"{row['error_percent']:+.1f}"
        times = [figure(row["predicted_us"]), row["bound"], figure(row["reported_us"]), error, row["half"] or "-"]
        lines.append([row["tokens"], f"{row['padded_rows']:,}", label(row), *stated, *times])
    heads = ["T", "padded rows", "kernel", "bytes", "operations", "device steps", "shared steps"]
    heads += ["predicted us", "bound", "reported us", "error %", "half"]
    title = "PREDICTED for an Apple M5 (10 cores), microseconds a layer: no Mac has run this"
    show_table(heads, lines, title)


def show_tiles(rows: Sequence[Row]) -> None:
    lines = []
    for row in rows:
        span = f"{row['predicted_us_low'] / 1e3:.1f}-{row['predicted_us_high'] / 1e3:.1f}"
        counts = [f"{row['tiles']:,}", f"{row['padded_rows']:,}"]
        lines.append([row["tokens"], row["tile_rows"], *counts, f"{row['predicted_us'] / 1e3:.1f}", span])
    show_table(
        ["T", "tile rows", "tiles", "padded rows", "products ms", "range"],
        lines,
        f"\nproducts by tile, PREDICTED; range: a core multiplies {SLOW_MULTIPLY} to {FAST_MULTIPLY} TFLOP/s. All that "
        "is reported has 16 rows",
    )


def show_errors(errors: Row) -> None:
    others = ", ".join(map(str, EXCHANGED))
    for name, tokens in (
        ("calibration", f"T = {', '.join(map(str, m5.CALIBRATION))}"),
        ("judged", f"T = {others}"),
        ("exchanged", f"a fit to T = {others}, judged on the rest"),
    ):
        some = errors[name]
        text = "no reported figure among these"
        if some["figures"]:
            mean, worst = f"{some['mean_percent']:.1f} %", f"{some['worst_percent']:+.1f} %"
            text = f"{some['figures']} figures, mean error {mean}, worst {worst} ({some['worst']})"
        say(f"{name} ({tokens}): {text}")


def show_notes(stage: str, rates: Rates) -> None:
    say("\nfitted: " + ", ".join(f"{name} {getattr(rates, name):.3g}" for name in m5.FITTED))
    say("reported: another engine's kernels of the same names and contracts; bytes, operations and steps are of ours")
    for line in disagreements(stage):
        say(f"the report against itself: {line}")
    if stage == "plan":
        rows = ", ".join(f"{random_load(count).n_rows:,} for {PADDED_ROWS[count]:,} at {count}" for count in TOKENS)
        say(f"padded rows of uniform routing, tiles of {TILE_ROWS}, for those of the report: {rows}")
    ends = [m5.predict(random_load(count), rates) for count in (TOKENS[0], TOKENS[-1])]
    for name, reported in UNPLACED.get(stage, {}).items():
        span = " to ".join(figure(times[name].us) for times in ends)
        say(f"{name}: reported {reported}, T not stated; predicted {span} from T = {TOKENS[0]} to {TOKENS[-1]}")
