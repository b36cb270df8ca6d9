"""The `expertile` command: parses, runs one command, and turns exceptions into one line and an exit code.

Exit codes: 0 done; 1 a check failed, or the file, the device or the input's numbers did; 2 the command was misused;
130 interrupted.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import expertile
from expertile.commands import bench, devices, inspect, parity, prefill, schedule, synth
from expertile.commands.common import CheckFailed, check_arguments

FAMILIES = (devices, inspect, prefill, synth, parity, bench, schedule)


class Parser(argparse.ArgumentParser):
    """argparse's, but for its errors."""

    def error(self, message: str) -> NoReturn:
        """Says what is wrong in one line, as every other error does; argparse would print the usage before it."""
        self.exit(2, f"expertile: {message} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command; a family's module adds its own part."""
    parser = Parser(
        prog="expertile", description="The Mixture-of-Experts half of LLM prefill, on quantized GGUF weights."
    )
    parser.add_argument("--version", action="version", version=f"expertile {expertile.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for family in FAMILIES:
        family.add(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a file's name may hold bytes that no encoding has
            stream.reconfigure(errors="backslashreplace")
    try:
        arguments = build_parser().parse_args(argv)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2
    try:
        check_arguments(arguments)
        return int(arguments.run(arguments))
    except BrokenPipeError:
        # The reader has gone (`expertile ... | head`). Python would report it once more while it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except (CheckFailed, expertile.GGUFError) as error:
        return _fail(error, 1)
    except (ValueError, TypeError, FileNotFoundError, IsADirectoryError) as error:
        return _fail(error, 2)
    except MemoryError as error:
        return _fail(f"[memory] expected enough for this, got less: {error}", 1)
    except (RuntimeError, OSError) as error:
        return _fail(error, 1)


def _fail(error: BaseException | str, code: int) -> int:
    text = " ".join(str(error).split()) or type(error).__name__
    print(f"expertile: {text}", file=sys.stderr)
    return code
