"""`expertile devices`: the devices, and why the others are absent."""

from __future__ import annotations

import argparse
from typing import Any

import expertile
from expertile.commands.common import add_command, finish, open_device, show_table


def add(subparsers: Any) -> None:
    add_command(subparsers, "devices", run, "the devices, and why the others are absent", device="all")


def run(arguments: argparse.Namespace) -> int:
    """Lists every kind of device; with --device, only that one, which must be present."""
    chosen = open_device(arguments.device)
    rows = []
    for status in expertile.list_devices():
        if status.kind == chosen.kind:
            rows.append({"device": status.kind, "present": True, "detail": chosen.name})
        elif arguments.device is None:
            rows.append({"device": status.kind, "present": bool(status.present), "detail": status.detail})
    show_table(
        ["device", "present", "what it is, or why it is absent"],
        [
            [
                row["device"] + (" *" if row["device"] == chosen.kind else ""),
                "yes" if row["present"] else "no",
                row["detail"],
            ]
            for row in rows
        ],
        "* is what a command takes where none is named" if arguments.device is None else None,
    )
    return finish(arguments, "devices", True, rows, chosen)
