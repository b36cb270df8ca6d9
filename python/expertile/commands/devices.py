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
    statuses = [status for status in expertile.list_devices() if arguments.device in (None, status.kind)]
    rows = [{"device": status.kind, "present": bool(status.present), "detail": status.detail} for status in statuses]
    show_table(
        ["device", "present", "what it is, or why it is absent"],
        [
            [
                status.kind + (" *" if status.kind == chosen.kind else ""),
                "yes" if status.present else "no",
                status.detail,
            ]
            for status in statuses
        ],
    )
    return finish(arguments, "devices", True, rows, chosen)
