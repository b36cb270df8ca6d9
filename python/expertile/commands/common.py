"""What the commands share: options, lists on the command line, tables, the random routing of benches."""

from __future__ import annotations

import argparse
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import expertile
from expertile import _core, report_json
from expertile.device import DEVICE_KINDS
from expertile.plan import MAX_TOKENS

LARGEST = 2**31 - 1
# What numpy raises for a file that is none of its own.
NOT_NUMPY = (ValueError, EOFError, zipfile.BadZipFile, zlib.error)


class CheckFailed(Exception):
    """A check failed: exit code 1, the message in one line."""


# --- options ----------------------------------------------------------------------------------------------------


def add_command(
    subparsers: Any, name: str, run: Any, summary: str, *, device: str = "the best present", description: str = ""
) -> argparse.ArgumentParser:
    """A command with the options that every command takes; `device`: the default of --device, "" for no such option."""
    parser: argparse.ArgumentParser = subparsers.add_parser(name, help=summary, description=description or summary)
    if device:
        kinds = ", ".join(DEVICE_KINDS)
        parser.add_argument(
            "--device",
            metavar="NAME",
            help=f"{kinds} (default: {device}); cpu:avx2, metal:k4 ... choose its instructions, its matrix form",
        )
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON")
    parser.set_defaults(run=run)
    return parser


def add_precision(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--precision",
        choices=("exact", "bf16"),
        default="exact",
        help="weights of the experts' GEMMs: exact, as halves, within 1e-3 of the float reference; or bf16, on cpu "
        "alone, rounded once more, within 4e-3 (default exact)",
    )


def positive(text: str, most: int = LARGEST) -> int:
    """A whole number from 1, that the engine's 32-bit counts can hold."""
    number = int(text) if text.isascii() and text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    if number > most:
        raise argparse.ArgumentTypeError(f"expected at most {most}, got {text!r}")
    return number


def not_negative(text: str) -> int:
    """A whole number of at least 0."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 0, got {text!r}")
    return int(text)


def positive_list(text: str) -> list[int]:
    """128,512,2048"""
    return [positive(part.strip()) for part in text.split(",")]


def token_list(text: str) -> list[int]:
    """128,512,2048, each of them a chunk that a window takes."""
    return [positive(part.strip(), MAX_TOKENS) for part in text.split(",")]


def type_list(text: str) -> list[str]:
    """Words between commas, spelled as GGUF spells its types; "all" stays."""
    return [word if word == "all" else word.upper() for word in word_list(text)]


def word_list(text: str) -> list[str]:
    """Words between commas."""
    words = [part.strip() for part in text.split(",")]
    if not all(words):
        raise argparse.ArgumentTypeError(f"expected words between commas, got {text!r}")
    return words


def tile(text: str) -> tuple[int, int, int, int]:
    """M,N,K,S: rows, columns and inner step of one threadgroup, and its simdgroups."""
    numbers = positive_list(text)
    if len(numbers) != 4:
        raise argparse.ArgumentTypeError(f"expected M,N,K,S, got {text!r}")
    compiled = [tuple(size) for size in _core.tiles()]
    if tuple(numbers) not in compiled:
        known = " or ".join(",".join(map(str, size)) for size in compiled)
        raise argparse.ArgumentTypeError(f"expected {known}, got {text!r}")
    return (numbers[0], numbers[1], numbers[2], numbers[3])


# --- devices ----------------------------------------------------------------------------------------------------


def open_device(kind: str | None, threads: int = 0) -> Any:
    """The device of `--device`, or the best present; "cpu:avx2" or "metal:k4" name its instructions or matrix form.

    ValueError for a name that no device has.
    """
    name, _, form = (kind or "").partition(":")
    if kind is not None and name not in DEVICE_KINDS:
        raise ValueError(f"[--device] expected one of {', '.join(DEVICE_KINDS)}, got {kind}")
    if not form:
        return expertile.open_device(name or None, threads=threads)
    if name == "metal":
        return expertile.open_device(name, matrix=form)
    return expertile.open_device(name, threads=threads, instructions=form)


def present_kinds(kind: str | None) -> list[str]:
    """The kinds to compare: those present, or the one asked for."""
    if kind is not None:
        open_device(kind)
        return [kind]
    return [status.kind for status in expertile.list_devices() if status.present]


# --- output -----------------------------------------------------------------------------------------------------


def console() -> Console:
    """Standard output. Lines are as long as they are: a narrow terminal wraps them, nothing is cut off."""
    return Console(highlight=False, soft_wrap=True, width=400)


def say(text: str = "") -> None:
    """A line of plain text: square brackets in it are not markup."""
    console().print(text, markup=False)


def show_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str | None = None) -> None:
    """The first column to the left, figures to the right."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    lines = [[str(cell) for cell in row] for row in rows]
    for index, column in enumerate(columns):
        cells = [line[index] for line in lines]
        figures = index > 0 and all(_is_figure(cell) for cell in cells)
        table.add_column(column, justify="right" if figures else "left", no_wrap=True)
    for line in lines:
        table.add_row(*(cell.replace("[", r"\[") for cell in line))
    console().print(table)


def _is_figure(cell: str) -> bool:
    return cell in ("", "-") or cell[0].isdigit() or (cell[0] in "+-." and cell[1:2].isdigit())


def human_bytes(count: float) -> str:
    """1,234,567,890 -> '1.23 GB'."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def finish(
    arguments: argparse.Namespace,
    command: str,
    ok: bool,
    rows: Sequence[Mapping[str, Any]],
    device: Any = None,
    top: Mapping[str, Any] | None = None,
) -> int:
    """Writes `--json` and returns the exit code."""
    if arguments.json:
        report_json.write(arguments.json, report_json.envelope(command, ok, rows, device, top))
    return 0 if ok else 1


def check_arguments(arguments: argparse.Namespace) -> None:
    """What holds for every command: no option is empty, every output can be written and is none of the inputs.

    Before the work, not after it. Raises ValueError.
    """
    given = {name: value for name, value in vars(arguments).items() if isinstance(value, str)}
    positional = {"model": "MODEL.gguf", **({"out": "OUT.gguf"} if arguments.command == "synth" else {})}
    option = {name: positional.get(name, "--" + name.replace("_", "-")) for name in given}
    for name, value in given.items():
        if not value:
            raise ValueError(f"[{option[name]}] expected a value, got ''")
    outputs = [name for name in ("out", "json", "csv") if name in given]
    for name in outputs:
        check_writable(given[name], option[name], replaced=name == "out")
    inputs = [name for name in ("model", "ids", "streams", "routing") if name in given]
    taken: dict[Path, str] = {Path(given[name]).resolve(): name for name in inputs}
    for name in outputs:
        path = Path(given[name]).resolve()
        # --out takes its name once all is done: it may replace the streams that it was made of.
        if path in taken and (name, taken[path]) != ("out", "streams"):
            raise ValueError(f"[{option[name]}] expected another file than that of {option[taken[path]]}, got {path}")
        if path.is_file() or not path.exists():
            taken[path] = name


def check_writable(path: str, option: str, replaced: bool) -> None:
    """Refuses a file that cannot be written, and leaves no trace. `replaced`: a new file is to take its name."""
    target = Path(path).resolve()
    try:
        if not target.parent.is_dir() or target.is_dir():
            raise ValueError(f"[{option}] expected a file in a folder that exists, got {path}")
        if not target.exists():
            target.open("xb").close()
            target.unlink()
        elif target.is_file():
            target.open("ab").close()
        elif replaced:
            raise ValueError(f"[{option}] expected a regular file or a new name, got {path}, a device or a pipe")
    except OSError as error:
        raise ValueError(f"[{option}] expected a file that can be written, got {path}: {error.strerror}") from error


# --- numbers ----------------------------------------------------------------------------------------------------


def spread(samples: Sequence[float], name: str, scale: float) -> dict[str, float]:
    """{name: median, name_p10, name_p90} of `samples`, times `scale`."""
    low, middle, high = np.percentile(np.asarray(samples, np.float64) * scale, [10, 50, 90])
    return {name: float(middle), f"{name}_p10": float(low), f"{name}_p90": float(high)}


def parse_routing(text: str) -> float | None:
    """uniform -> None, zipf:S -> S."""
    if text == "uniform":
        return None
    head, _, tail = text.partition(":")
    try:
        power = float(tail)
    except ValueError:
        power = -1.0
    if head != "zipf" or not 0 < power < 100:
        raise argparse.ArgumentTypeError(f"expected uniform or zipf:S with S above 0, got {text!r}")
    return power


def random_routing(
    n_tokens: int, n_experts: int, top_k: int, seed: int, zipf: float | None = None
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """ids [T, K] of different experts in each token, weights [T, K] that sum to 1.

    Experts are drawn without replacement, in proportion to 1 (uniform) or to 1 / rank^S (zipf), by Gumbel's trick: the
    K largest of log(p) + noise. The ranks are shuffled, so that busy experts do not lie side by side.
    """
    generator = np.random.default_rng(seed)
    log_p = np.zeros(n_experts, np.float32)
    if zipf is not None:
        log_p = generator.permutation(-zipf * np.log(np.arange(1, n_experts + 1))).astype(np.float32)
    ids = np.empty((n_tokens, top_k), np.int32)
    for start in range(0, n_tokens, 4096):
        count = min(4096, n_tokens - start)
        score = generator.gumbel(size=(count, n_experts)).astype(np.float32) + log_p
        ids[start : start + count] = np.argpartition(-score, top_k - 1, axis=1)[:, :top_k]
    weights = generator.random((n_tokens, top_k), np.float32) + np.float32(0.05)
    weights /= weights.sum(axis=1, keepdims=True)
    return ids, weights
