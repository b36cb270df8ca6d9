"""Brings the README's figures of the H200 up to date with results/h200/*.json: python3 tests/cuda/readme_table.py"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from expertile import _core

ROOT = Path(__file__).parents[2]
TOKENS = (128, 2048, 8192, 32768, 131072)
NAMES = {"padscan": "`padscan`", "baseline": "`baseline`", "align_atomic": "atomic peer"}


def result(stage: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((ROOT / "results" / "h200" / f"{stage}.json").read_text())
    return document


def figure(us: float) -> str:
    return f"{us:#.3g}".removesuffix(".")


def plan_table() -> str:
    rows = [row for row in result("plan")["rows"] if row["kernel"] == "total"]
    times = {(row["variant"], row["tokens"]): row["us"] for row in rows}
    defaults = {n: _core.default_plan("cuda", n) for n in TOKENS}
    lines = [
        ["T", *map(str, TOKENS)],
        ["---"] * (len(TOKENS) + 1),
        ["the default", *(figure(times[defaults[n], n]) for n in TOKENS)],
        ["its form", *(f"`{defaults[n].removeprefix('two_dispatch_')}`" for n in TOKENS)],
        *([name, *(figure(times[variant, n]) for n in TOKENS)] for variant, name in NAMES.items()),
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines).replace("| --- ", "|---").replace("---| ", "---|")


def updated(text: str) -> str:
    """The README with the results' figures."""
    plan, gather = result("plan"), result("gather")
    fraction = next(
        row["peak_fraction"] for row in gather["rows"] if (row["kernel"], row["tokens"]) == ("mm_gather_h", 8192)
    )
    edits = {
        r"NVIDIA H200 \(driver [\d.]+, [\d-]+\)": f"NVIDIA H200 (driver {plan['driver']}, {plan['date']})",
        r"\| T \| 128 \| 2048 \| 8192 .*?\n(?=\n)": plan_table(),
        r"runs at [\d.]+ times the measured copy bandwidth \([\d.]+ TB/s\)": (
            f"runs at {fraction:.2f} times the measured copy bandwidth ({gather['copy_gb_s'] / 1e3:.1f} TB/s)"
        ),
    }
    for pattern, new in edits.items():
        text, count = re.subn(pattern, new, text, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"[readme] expected one place, got {count}: {pattern}")
    return text


def main() -> int:
    readme = ROOT / "README.md"
    readme.write_text(updated(readme.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
