"""`expertile prefill`: the main job. Prompt tokens, chunk by chunk, through the MoE half of every layer of a model."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import expertile
from expertile import _core, quants, report_json
from expertile.commands.common import (
    NOT_NUMPY,
    CheckFailed,
    add_command,
    add_precision,
    finish,
    human_bytes,
    not_negative,
    open_device,
    positive,
    say,
    show_table,
)
from expertile.commands.synth import DEFAULT_LAYERS, add_model_options, model_sizes, synthetic
from expertile.synth import random_streams, replaced_file

DEFAULT_TOKENS = 512
STREAM_BLOCK = 256  # random streams are drawn by blocks of so many tokens, whatever the chunk


def add(subparsers: Any) -> None:
    parser = add_command(
        subparsers,
        "prefill",
        run,
        "run a prompt through the MoE half of every layer",
        description="Runs a prompt, chunk by chunk, through the MoE half of every layer of a GGUF file, or of a model "
        "of random weights (--synthetic). The streams that enter the first layer are random unless --ids or --streams "
        "is given. The attention half of a layer is not part of this: a server puts it in by token_mixer.",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL.gguf", help="a GGUF file, or the first of its shards")
    add_model_options(parser, "--synthetic", "random weights in memory instead of a file")
    parser.add_argument(
        "--layers", type=positive, metavar="N", help=f"layers (default: the file's, {DEFAULT_LAYERS} of --synthetic)"
    )
    parser.add_argument(
        "--tokens", type=positive, metavar="N", help=f"prompt tokens (default {DEFAULT_TOKENS}, or as the file given)"
    )
    parser.add_argument("--chunk", type=positive, metavar="N", help="tokens in a chunk (default: at most 512)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--ids", metavar="FILE.npy", help="token ids [T], embedded by the model's token_embd")
    source.add_argument("--streams", metavar="FILE.npy", help="residual streams [T, C, D] before the first layer")
    parser.add_argument("--out", metavar="FILE.npy", help="write the streams [T, C, D] after the last layer")
    parser.add_argument(
        "--threads", type=not_negative, default=0, metavar="N", help="threads of the device (default: all)"
    )
    add_precision(parser)


@dataclass
class Source:
    """Where the streams that enter the first layer come from: a file, token ids, or a seed."""

    n_streams: int
    dim: int
    n_tokens: int
    seed: int
    streams: NDArray[Any] | None = None
    embedded: Any = None  # ids [T] -> [T, D]
    ids: NDArray[Any] | None = None

    @property
    def text(self) -> str:
        if self.streams is not None:
            return "streams of the file given"
        return f"random streams, seed {self.seed}" if self.ids is None else "token embeddings"

    def chunk(self, start: int, stop: int) -> NDArray[np.float32]:
        """The streams [stop - start, C, D] of some tokens; they do not depend on where the chunks lie."""
        if self.streams is not None:
            return np.ascontiguousarray(self.streams[start:stop], dtype=np.float32)
        if self.ids is not None:
            rows = self.embedded(self.ids[start:stop])
            return np.ascontiguousarray(np.broadcast_to(rows[:, None, :], (stop - start, self.n_streams, self.dim)))
        out = np.empty((stop - start, self.n_streams, self.dim), np.float32)
        for block in range(start // STREAM_BLOCK, (stop - 1) // STREAM_BLOCK + 1):
            drawn = random_streams(STREAM_BLOCK, self.n_streams, self.dim, seed=self.seed << 32 | block)
            low, high = max(start, block * STREAM_BLOCK), min(stop, (block + 1) * STREAM_BLOCK)
            out[low - start : high - start] = drawn[low - block * STREAM_BLOCK : high - block * STREAM_BLOCK]
        return out


@dataclass
class Job:
    """One run's result."""

    seconds: float  # inside the window, all chunks
    drawing: float  # making or reading the streams
    steps: dict[str, float]
    saturated: int


def run(arguments: argparse.Namespace) -> int:
    device = open_device(arguments.device, arguments.threads)
    started = time.perf_counter()
    model, label = load_model(arguments)
    generated = time.perf_counter()
    source = open_source(arguments, model)
    chunk = min(arguments.chunk or DEFAULT_TOKENS, source.n_tokens)
    window = expertile.Window(model, device=device, max_tokens=chunk, precision=arguments.precision, profile=True)
    prepared = time.perf_counter()
    times = {"model_s": generated - started, "prepare_s": prepared - generated}
    config = model.config
    say(f"{label}: {config.n_layers} layers, {config.n_experts} experts, top {config.top_k}, dim {config.dim}")
    operands = "" if window.precision == "exact" else f", precision {window.precision}"
    say(f"device {device.kind} ({device.name}){operands}; {source.n_tokens} tokens in chunks of {chunk}; {source.text}")
    try:
        with output_file(arguments.out, (source.n_tokens, config.n_streams, config.dim)) as out:
            job = run_chunks(window, source, chunk, config.n_layers, out)
    except RuntimeError as error:
        finish(arguments, "prefill", False, [], device, {"error": str(error), **times})
        raise CheckFailed(str(error)) from error
    top = {
        "tokens_per_s": source.n_tokens / job.seconds,
        "peak_rss_bytes": report_json.peak_rss_bytes(),
        "ms_a_layer": job.seconds * 1e3 / config.n_layers,
        "tokens": source.n_tokens,
        "chunk": chunk,
        "layers": config.n_layers,
        "precision": window.precision,
        "model": label,
        "window_bytes": int(window.memory()),
        "saturated": job.saturated,
        **times,
        "streams_s": job.drawing,
    }
    rows = step_rows(job, source.n_tokens, config.n_layers, device.kind)
    show(rows, top)
    if arguments.out:
        say(f"streams after the last layer: {arguments.out}")
    return finish(arguments, "prefill", True, rows, device, top)


def load_model(arguments: argparse.Namespace) -> tuple[Any, str]:
    """The model of the file, cut to --layers, or one of random weights."""
    if (arguments.model is None) == (arguments.synthetic is None):
        raise ValueError(
            "[prefill] expected MODEL.gguf or --synthetic, got " + ("both" if arguments.model else "neither")
        )
    if arguments.synthetic is not None:
        if arguments.ids:
            raise ValueError("[--ids] expected a model with token embeddings, got --synthetic, which has none")
        layers = arguments.layers or DEFAULT_LAYERS
        model = synthetic(arguments.synthetic, layers, arguments.gu, arguments.dn, arguments.seed)
        return model, f"synthetic {arguments.synthetic}"
    for option in ("gu", "dn"):
        if getattr(arguments, option):
            raise ValueError(f"[--{option}] expected --synthetic, got a file, whose types are its own")
    model = expertile.open_gguf(arguments.model)
    if arguments.layers is not None:
        if arguments.layers > model.config.n_layers:
            raise ValueError(f"[--layers] expected at most {model.config.n_layers}, got {arguments.layers}")
        model = expertile.Model.from_tensors(model_sizes(model.config, arguments.layers), model.tensors)
    return model, Path(arguments.model).name


def open_source(arguments: argparse.Namespace, model: Any) -> Source:
    """Opens --streams or --ids and checks it against the model; else random streams."""
    config = model.config
    source = Source(config.n_streams, config.dim, arguments.tokens or DEFAULT_TOKENS, arguments.seed)
    if arguments.streams:
        array = load_array(arguments.streams, "--streams")
        shape = (config.n_streams, config.dim)
        if array.ndim != 3 or array.shape[1:] != shape or array.dtype.kind != "f":
            expected = f"floats [T, {shape[0]}, {shape[1]}]"
            raise ValueError(f"[--streams] expected {expected}, got {array.dtype} {list(array.shape)}")
        source.streams = array
        given = array.shape[0]
    elif arguments.ids:
        ids = load_array(arguments.ids, "--ids")
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError(f"[--ids] expected whole numbers [T], got {ids.dtype} {list(ids.shape)}")
        source.ids, source.embedded = ids, embedding(model, ids)
        given = ids.shape[0]
    else:
        return source
    if given < 1 or (arguments.tokens or 1) > given:
        raise ValueError(f"[--tokens] expected 1..{given}, the tokens of the file, got {arguments.tokens or 0}")
    source.n_tokens = arguments.tokens or given
    return source


def load_array(path: str, option: str) -> NDArray[Any]:
    """A .npy file, mapped; nothing is unpickled."""
    if Path(path).exists() and not Path(path).is_file():
        raise ValueError(f"[{option}] expected a .npy file, got {path}, which is no regular file")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except NOT_NUMPY as error:
        raise ValueError(f"[{option}] expected a .npy file of plain numbers, got {path}: {error}") from error
    if not isinstance(array, np.ndarray):
        raise ValueError(f"[{option}] expected a .npy file, got the archive {path}")
    return array


def embedding(model: Any, ids: NDArray[Any]) -> Any:
    """A function from ids [T] to rows [T, D] of token_embd; every id is checked first."""
    tensor = model.tensors.get("token_embd.weight")
    if tensor is None:
        raise ValueError("[--ids] expected a model with token_embd.weight, got none; give --streams instead")
    dim, vocabulary = tensor.shape if len(tensor.shape) == 2 else (tensor.shape[0], 1)
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= vocabulary):
        raise ValueError(f"[--ids] expected ids 0..{vocabulary - 1}, got {int(ids.min())}..{int(ids.max())}")
    table = np.asarray(tensor.data).reshape(vocabulary, -1)

    def rows(some: NDArray[Any]) -> NDArray[np.float32]:
        return quants.dequantize(table[some], tensor.type, (dim, len(some)))

    return rows


@contextmanager
def output_file(path: str | None, shape: tuple[int, int, int]) -> Iterator[NDArray[np.float32] | None]:
    """A float32 .npy mapped for writing, which gets its name only when everything went well."""
    if path is None:
        yield None
        return
    with replaced_file(Path(path)) as part:
        out = np.lib.format.open_memmap(part, mode="w+", dtype=np.float32, shape=shape)
        yield out
        out.flush()


def run_chunks(window: Any, source: Source, chunk: int, n_layers: int, out: NDArray[np.float32] | None) -> Job:
    """All chunks in order. Only the time inside the window counts."""
    before = dict(window.seconds)
    seconds = drawing = 0.0
    starts = range(0, source.n_tokens, chunk)
    with progress_bar(len(starts) * n_layers) as advance:
        for start in starts:
            stop = min(start + chunk, source.n_tokens)
            began = time.perf_counter()
            x = source.chunk(start, stop)
            ready = time.perf_counter()
            try:
                y = window.prompt_chunk(x, progress=advance)
            except expertile.RouteError as error:
                # The window counts tokens from the start of the chunk, the caller from the start of the prompt.
                raise expertile.RouteError({start + token: layer for token, layer in error.tokens.items()}) from error
            done = time.perf_counter()
            drawing += ready - began
            seconds += done - ready
            check_finite(y, start)
            if out is not None:
                out[start:stop] = y
    after = window.seconds
    order = [name for name in _core.step_names() if name in after]
    steps = {name: after[name] - before.get(name, 0.0) for name in order}
    return Job(seconds, drawing, steps, int(window.saturated))


def check_finite(y: NDArray[np.float32], start: int) -> None:
    """A NaN that came out is a failure of the run, never a result."""
    if not np.isfinite(y).all():
        token, stream, channel = np.argwhere(~np.isfinite(y))[0]
        value = y[token, stream, channel]
        raise RuntimeError(f"[prefill] expected finite streams, got {value} at token {start + token}, stream {stream}")


@contextmanager
def progress_bar(total: int) -> Iterator[Any]:
    """A bar on a terminal, nothing elsewhere. Yields the callback of prompt_chunk."""
    bar = Progress(
        TextColumn("prefill"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("layers of chunks"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not Console(stderr=True).is_terminal,
    )
    with bar:
        task = bar.add_task("prefill", total=total)
        yield lambda layer, n_layers: bar.advance(task)


def step_rows(job: Job, n_tokens: int, n_layers: int, kind: str) -> list[dict[str, Any]]:
    """A row a step, one for what the host did between them, and the total."""
    steps = dict(job.steps)
    steps["host"] = max(0.0, job.seconds - sum(steps.values()))
    steps["total"] = job.seconds
    return [
        {
            "step": name,
            "device": kind,
            "tokens": n_tokens,
            "ms": seconds * 1e3,
            "ms_a_layer": seconds * 1e3 / n_layers,
            "share": seconds / job.seconds,
        }
        for name, seconds in steps.items()
    ]


def show(rows: list[dict[str, Any]], top: dict[str, Any]) -> None:
    say()
    show_table(
        ["step", "ms", "ms a layer", "%"],
        [[row["step"], f"{row['ms']:.1f}", f"{row['ms_a_layer']:.2f}", f"{row['share']:.1%}"[:-1]] for row in rows],
    )
    say()
    say(f"{top['tokens_per_s']:.1f} tokens/s, {top['ms_a_layer']:.1f} ms a layer")
    say(f"not counted: model {top['model_s']:.1f} s, window {top['prepare_s']:.1f} s, streams {top['streams_s']:.1f} s")
    say(f"peak memory {human_bytes(top['peak_rss_bytes'])}, of it window {human_bytes(top['window_bytes'])}")
    if top["saturated"]:
        say(f"{top['saturated']} activations met the fp16 limit and were saturated")
