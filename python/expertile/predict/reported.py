"""Figures reported for a reference engine on an Apple M5 (10-core GPU, 24 GB), in microseconds a layer.

512 experts, top 10, hidden 2560, expert FFN 640; gate and up IQ2_XS in tiles 16,32,32,4, down IQ4_NL in 16,64,32,2.
They are that engine's kernels of the same names and contracts, not ours. Two tables; where both hold a figure they
differ: see `disagreements`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

N_EXPERTS, TOP_K, DIM, FFN, TILE_ROWS = 512, 10, 2560, 640, 16
TOKENS = (128, 512, 1024, 2048)
PADDED_ROWS = {128: 7568, 512: 8352, 1024: 14256, 2048: 24160}

_KERNELS: dict[str, tuple[float, ...]] = {
    "mm_clear": (4.15, 0.93, 0.88, 0.93),
    "mm_hist": (1.56, 1.13, 1.10, 1.33),
    "mm_scan": (2.90, 3.27, 3.81, 4.77),
    "mm_scan_pad": (4.02, 4.12, 4.69, 5.60),
    "mm_place": (50.46, 50.82, 50.97, 81.41),
    "mm_place_two_level": (3.92, 4.02, 4.14, 6.19),
    "plan baseline": (54.93, 55.54, 56.29, 88.08),
    "plan padscan": (8.95, 9.18, 9.63, 13.20),
}
_END_TO_END: dict[str, tuple[float, ...]] = {
    "plan baseline": (46.9, 47.2, 48.0, 77.2),
    "plan padscan": (8.7, 8.6, 9.7, 13.1),
    "mm_gather": (236.7, 278.8, 762.2, 2028.3),
    "mm_gather_h": (235.3, 274.2, 495.2, 1190.5),
    "layer before": (13123.8, 14689.1, 22201.9, 37210.6),
    "layer after": (12965.0, 14603.8, 21900.3, 36216.1),
}

GATHERS = ("mm_gather", "mm_gather_h")
# Whole plans, and the kernels whose times make them up (mm_clear runs beside mm_hist).
PLAN_SUMS = {
    "plan baseline": ("mm_hist", "mm_scan", "mm_place"),
    "plan padscan": ("mm_hist", "mm_scan_pad", "mm_place_two_level"),
}


@dataclass(frozen=True)
class Reported:
    """`name` is one that `m5.predict` knows; `table` is "kernels", "end to end" or "text"."""

    tokens: int
    table: str
    name: str
    us: float


REPORTED: tuple[Reported, ...] = (
    *(
        Reported(tokens, table, name, us)
        for table, columns in (("kernels", _KERNELS), ("end to end", _END_TO_END))
        for name, column in columns.items()
        for tokens, us in zip(TOKENS, column, strict=True)
    ),
    Reported(2048, "text", "gemms", 35000.0),
)


def find(reported: Sequence[Reported], table: str, name: str, tokens: int) -> float | None:
    """The figure, or None where none is reported."""
    return next((f.us for f in reported if (f.table, f.name, f.tokens) == (table, name, tokens)), None)


def disagreements(stage: str, reported: Sequence[Reported] = REPORTED) -> list[str]:
    """Where the tables of a bench's stage contradict each other or themselves: no model is nearer than that to both."""

    def column(table: str, name: str) -> list[float]:
        return [us for tokens in TOKENS if (us := find(reported, table, name, tokens)) is not None]

    def spelled(values: Iterable[float], unit: str, digits: int) -> str:
        return ", ".join(f"{value:+.{digits}f} {unit} at {t}" for value, t in zip(values, TOKENS, strict=True))

    lines = []
    for plan, kernels in PLAN_SUMS.items() if stage == "plan" else ():
        total, end = column("kernels", plan), column("end to end", plan)
        off = spelled((100 * (b / a - 1) for a, b in zip(total, end, strict=True)), "%", 0)
        lines.append(f"{plan}, end to end against by kernel: {off}")
        sums = map(sum, zip(*(column("kernels", kernel) for kernel in kernels), strict=True))
        off = spelled((a - b for a, b in zip(total, sums, strict=True)), "us", 2)
        lines.append(f"{plan} against the sum of its kernels ({', '.join(kernels)}): {off}")
    if stage == "plan":
        clear = ", ".join(f"{us} us at {t}" for us, t in zip(column("kernels", "mm_clear"), TOKENS, strict=True))
        lines.append(f"mm_clear, the fewer the rows the longer: {clear}")
    if stage == "gather":
        rates = [
            4 * DIM * PADDED_ROWS[t] / us / 1e3 for t, us in zip(TOKENS, column("end to end", "mm_gather"), strict=True)
        ]
        wrote = ", ".join(f"{rate:.0f} GB/s at {t}" for rate, t in zip(rates, TOKENS, strict=True))
        lines.append(f"mm_gather on a memory of 153 GB/s, padded rows written alone: {wrote}")
    if stage == "moe":
        gains = []
        for before, after in (("layer before", "layer after"), tuple(PLAN_SUMS), GATHERS):
            pairs = zip(column("end to end", before), column("end to end", after), strict=True)
            gains.append([a - b for a, b in pairs])
        off = spelled((layer - plan - gather for layer, plan, gather in zip(*gains, strict=True)), "us", 0)
        lines.append(f"what the layer gained beyond the gains of its plan and its gather: {off}")
    return lines
