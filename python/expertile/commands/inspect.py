"""`expertile inspect MODEL.gguf`: sizes, tensors, types, and the memory that a chunk of tokens needs."""

from __future__ import annotations

import argparse
import re
from typing import Any

import expertile
from expertile.commands.common import add_command, finish, human_bytes, open_device, positive, say, show_table

SIZES = ("n_layers", "dim", "n_experts", "top_k", "expert_ffn", "shared_ffn", "n_streams", "low_rank", "rms_eps")


def add(subparsers: Any) -> None:
    parser = add_command(subparsers, "inspect", run, "sizes, tensors, types, memory needed for a chunk size")
    parser.add_argument("model", metavar="MODEL.gguf", help="a GGUF file, or the first of its shards")
    parser.add_argument("--chunk", type=positive, default=512, metavar="N", help="tokens in a chunk (default 512)")


def run(arguments: argparse.Namespace) -> int:
    """Opens the file as `prefill` would, and builds the window to ask it for its size."""
    model = expertile.open_gguf(arguments.model)
    device = open_device(arguments.device)
    window = expertile.Window(model, device=device, max_tokens=arguments.chunk)
    sizes = {name: plain_size(getattr(model.config, name)) for name in SIZES}
    show_table(["size", "value"], [[name, size_text(value)] for name, value in sizes.items()])
    say()
    groups = group_tensors(model.tensors)
    show_table(
        ["tensor", "layers", "type", "shape", "tensors", "bytes"],
        [
            [
                group["name"],
                ranges(group["layers"]),
                group["format"],
                " x ".join(map(str, group["shape"])),
                len(group["names"]),
                human_bytes(group["bytes"]),
            ]
            for group in groups
        ],
    )
    used = moe_bytes(model)
    memory = int(window.memory())
    say()
    say(f"weights of the MoE half {human_bytes(used)}; all tensors {human_bytes(sum(g['bytes'] for g in groups))}")
    say(f"window for a chunk of {arguments.chunk} tokens on {device.kind}: {human_bytes(memory)}")
    rows = [
        {"tensor": name, "format": tensor.type, "shape": list(tensor.shape), "bytes": int(tensor.bytes)}
        for name, tensor in sorted(model.tensors.items())
    ]
    top = {"sizes": sizes, "chunk": arguments.chunk, "window_bytes": memory, "weight_bytes": used}
    return finish(arguments, "inspect", True, rows, device, top)


def plain_size(value: Any) -> Any:
    """A size by layer becomes a list."""
    return [int(item) for item in value] if hasattr(value, "__len__") else value


def size_text(value: Any) -> str:
    if not isinstance(value, list):
        return f"{value:g}" if isinstance(value, float) else f"{value:,}"
    return str(value[0]) if len(set(value)) == 1 else ",".join(map(str, value))


def moe_bytes(model: Any) -> int:
    """Bytes of the tensors that the MoE half reads."""
    part = re.compile(r"blk\.\d+\.(ffn_|hc_ffn_)")
    return sum(int(tensor.bytes) for name, tensor in model.tensors.items() if part.match(name))


def group_tensors(tensors: dict[str, Any]) -> list[dict[str, Any]]:
    """Tensors of one name, type and shape in several layers become one line."""
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, tensor in tensors.items():
        match = re.match(r"blk\.(\d+)\.(.+)", name)
        stem = match.group(2) if match else name
        key = (match is None, stem, tensor.type, tuple(tensor.shape))
        fresh = {
            "name": stem,
            "format": tensor.type,
            "shape": list(tensor.shape),
            "names": [],
            "layers": [],
            "bytes": 0,
        }
        group = groups.setdefault(key, fresh)
        group["names"].append(name)
        group["layers"] += [int(match.group(1))] if match else []
        group["bytes"] += int(tensor.bytes)
    return [groups[key] for key in sorted(groups, key=lambda key: (key[0], key[1], min(groups[key]["layers"] or [0])))]


def ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> '0-2,5'."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts) or "-"
