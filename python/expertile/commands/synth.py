"""`expertile synth OUT.gguf`: writes a model of random quant blocks. Also the options that make such a model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import expertile
from expertile import report_json
from expertile.commands.common import add_command, finish, human_bytes, not_negative, positive, say
from expertile.quants import tensor_bytes
from expertile.synth import PRESETS, synthetic_model, write_gguf

DEFAULT_LAYERS = 2
DEFAULT_GATE_UP = "IQ2_XS"
DEFAULT_DOWN = "IQ4_NL"


def add(subparsers: Any) -> None:
    parser = add_command(subparsers, "synth", run, "write a model of random quant blocks", device="")
    parser.add_argument("out", metavar="OUT.gguf", help="the file to write")
    add_model_options(parser, "--preset", "sizes of the model (default tiny)", "tiny")
    parser.add_argument("--layers", type=positive, metavar="N", help=f"layers (default {DEFAULT_LAYERS})")


def add_model_options(parser: argparse.ArgumentParser, name: str, text: str, default: str | None = None) -> None:
    """The options of a synthetic model; `name` chooses its sizes."""
    parser.add_argument(name, choices=sorted(PRESETS), default=default, help=text)
    parser.add_argument("--gu", metavar="TYPE", help=f"type of gate and up experts (default {DEFAULT_GATE_UP})")
    parser.add_argument("--dn", metavar="TYPE", help=f"type of down experts (default {DEFAULT_DOWN})")
    parser.add_argument("--seed", type=not_negative, default=0, metavar="N", help="seed of all that is random")


def run(arguments: argparse.Namespace) -> int:
    """The same preset, layers, types and seed give the same file, and what `prefill --synthetic` runs."""
    layers = arguments.layers or DEFAULT_LAYERS
    gate_up, down = expert_types(arguments)
    check_memory(arguments.preset, layers, gate_up, down)
    sizes, tensors = synthetic_model(arguments.preset, layers, gate_up, down, arguments.seed)
    paths = write_gguf(arguments.out, sizes, tensors)
    written = sum(path.stat().st_size for path in paths)
    say(f"{arguments.out}: {arguments.preset}, {layers} layers, {len(tensors)} tensors, {human_bytes(written)}")
    rows = [
        {"tensor": name, "format": tensor.type, "shape": list(tensor.shape), "bytes": int(tensor.data.nbytes)}
        for name, tensor in tensors.items()
    ]
    return finish(arguments, "synth", True, rows, None, {"path": str(Path(arguments.out)), "bytes": written})


def expert_types(arguments: argparse.Namespace) -> tuple[str, str]:
    """Types of gate/up and of down, in the spelling of GGUF."""
    return (arguments.gu or DEFAULT_GATE_UP).upper(), (arguments.dn or DEFAULT_DOWN).upper()


def synthetic(
    preset: str, layers: int = 1, gu: str | None = None, dn: str | None = None, seed: int = 0
) -> expertile.Model:
    """A model of random weights in memory."""
    gate_up, down = (gu or DEFAULT_GATE_UP).upper(), (dn or DEFAULT_DOWN).upper()
    check_memory(preset, layers, gate_up, down)
    sizes, tensors = synthetic_model(preset, layers, gate_up, down, seed)
    return expertile.Model.from_tensors(sizes, tensors)


def check_memory(preset: str, layers: int, gate_up: str, down: str) -> None:
    """Refuses, before the work, more experts than the machine's free memory holds."""
    sizes = PRESETS[preset]
    dim, ffn, n_experts = sizes["dim"], sizes["expert_ffn"], sizes["n_experts"]
    layer_bytes = 2 * tensor_bytes(gate_up, (dim, ffn, n_experts)) + tensor_bytes(down, (ffn, dim, n_experts))
    free = report_json.available_bytes()
    if free is not None and layers * layer_bytes > free:
        need = human_bytes(layers * layer_bytes)
        raise ValueError(
            f"[--layers] expected at most {free // layer_bytes} ({human_bytes(free)} free), got {layers}: {need}"
        )


def model_sizes(config: Any, layers: int) -> dict[str, Any]:
    """The sizes of `config`, cut to its first layers."""
    names = ("dim", "n_experts", "top_k", "shared_ffn", "n_streams", "low_rank", "rms_eps")
    ffn = [int(size) for size in config.expert_ffn][:layers]
    return {"n_layers": layers, "expert_ffn": ffn} | {name: getattr(config, name) for name in names}
