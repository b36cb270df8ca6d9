"""`expertile schedule`: a layer's groups, kernel by kernel, what each reads and writes, and check_program's verdict."""

from __future__ import annotations

import argparse
from typing import Any

import expertile
from expertile import _core
from expertile.commands.common import add_command, finish, open_device, positive, say, show_table
from expertile.commands.synth import synthetic
from expertile.synth import PRESETS


def add(subparsers: Any) -> None:
    parser = add_command(subparsers, "schedule", run, "the groups of a layer, and the verdict on their barriers")
    parser.add_argument("model", nargs="?", metavar="MODEL.gguf", help="a GGUF file (default: a synthetic tiny model)")
    parser.add_argument("--preset", choices=sorted(PRESETS), help="sizes of the synthetic model (default tiny)")
    parser.add_argument("--layer", type=int, default=0, metavar="N", help="the layer (default 0)")
    parser.add_argument("--tokens", type=positive, default=512, metavar="N", help="tokens in the chunk (default 512)")


def run(arguments: argparse.Namespace) -> int:
    """Exit code 1 when the program of any plan variant has a fault."""
    if arguments.model and arguments.preset:
        raise ValueError(f"[--preset] expected no MODEL.gguf beside it, got {arguments.model}")
    device = open_device(arguments.device)
    model = expertile.open_gguf(arguments.model) if arguments.model else synthetic(arguments.preset or "tiny", layers=1)
    if not 0 <= arguments.layer < model.config.n_layers:
        raise ValueError(f"[--layer] expected 0..{model.config.n_layers - 1}, got {arguments.layer}")
    default = expertile.Window(model, device=device, max_tokens=arguments.tokens)
    program = default.program(arguments.layer, arguments.tokens)
    rows = launch_rows(program)
    show_table(
        ["group", "kernel", "step", "grid", "reads", "writes"],
        [
            [
                f"{row['group']} {row['name']}" if row["first"] else "",
                row["kernel"],
                row["step"],
                ("up to " if row["indirect"] else "") + " x ".join(map(str, row["grid"])),
                ", ".join(row["reads"]),
                ", ".join(row["writes"]),
            ]
            for row in rows
        ],
        f"{program['name']}, {arguments.tokens} tokens, device {device.kind}",
    )
    variants, faults = plan_costs(model, device, arguments)
    say()
    show_table(
        ["plan variant", "dispatches", "barriers", "of them the plan's alone", "verdict"],
        [[v["variant"], v["dispatches"], v["barriers"], v["own_barriers"], v["verdict"]] for v in variants],
        "what a layer spends on its plan",
    )
    say()
    faults = [{"variant": "default", **fault} for fault in program["faults"]] + faults
    for fault in faults:
        say(f"{fault['variant']}: {fault['kind']} at {fault['where']}: {fault['detail']}")
    say(f"check_program: {len(faults)} faults" if faults else "check_program: no hazard, no redundant barrier")
    top = {"tokens": arguments.tokens, "layer": arguments.layer, "plan_variants": variants, "faults": faults}
    return finish(arguments, "schedule", not faults, rows, device, top)


def launch_rows(program: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a launch."""
    return [
        {
            "group": number,
            "name": group["name"],
            "first": index == 0,
            "kernel": launch["kernel"],
            "step": launch["step"],
            "grid": list(launch["grid"]),
            "indirect": bool(launch["indirect"]),
            "reads": list(launch["reads"]),
            "writes": list(launch["writes"]),
        }
        for number, group in enumerate(program["groups"], 1)
        for index, launch in enumerate(group["launches"])
    ]


def plan_costs(model: Any, device: Any, arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], list[Any]]:
    """Dispatches and barriers of each variant's plan, in the whole layer's program."""
    variants, faults = [], []
    for variant in _core.plan_variants():
        window = expertile.Window(model, device=device, max_tokens=arguments.tokens, plan=variant)
        program = window.program(arguments.layer, arguments.tokens)
        groups = [[launch["step"] for launch in group["launches"]] for group in program["groups"]]
        planned = [steps for steps in groups if "plan" in steps]
        variants.append(
            {
                "variant": variant,
                "dispatches": sum(steps.count("plan") for steps in planned),
                "barriers": len(planned),
                "own_barriers": sum(set(steps) == {"plan"} for steps in planned),
                "verdict": "faults" if program["faults"] else "ok",
            }
        )
        faults += [{"variant": variant, **fault} for fault in program["faults"]]
    return variants, faults
