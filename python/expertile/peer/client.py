"""The bench's side of the peer process."""

from __future__ import annotations

import importlib.util
import io
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from expertile.peer.protocol import Array, read_frame, write_frame
from expertile.quants import type_info

PEERS = ("ggml",)
EXTRA = "pip install '.[peer]' in the source tree"
TIMEOUT = 600.0  # seconds without a byte from the peer
BUFFER = 1 << 20
COMMAND = (sys.executable, "-m", "expertile.peer.ggml_process")


class PeerError(RuntimeError):
    """The peer process failed, died, or fell silent."""


def find_libraries(folder: str | None) -> str:
    """The folder of ggml's shared libraries: the given one, or that of the package llama_cpp. ValueError for none."""
    if folder is not None:
        if not Path(folder).is_dir():
            raise ValueError(f"[--peer-lib] expected a folder with libggml, got {folder}")
        return folder
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise ValueError(
            f"[--peer] expected llama-cpp-python, whose ggml is the peer, got no such package: {EXTRA}, "
            "or --peer-lib DIR with its libraries"
        )
    return str(Path(spec.origin).parent / "lib")


class Peer:
    """A running peer process. One request at a time; use as a context manager.

    folder   where ggml's shared libraries lie
    threads  threads of its CPU backend
    command  what to start instead of the ggml process

    Raises PeerError where the process fails, dies, or sends nothing for `timeout` seconds.
    """

    def __init__(
        self, folder: str, threads: int, command: Sequence[str] | None = None, timeout: float = TIMEOUT
    ) -> None:
        self.timeout = timeout
        self._messages = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        root = str(Path(__file__).resolve().parents[2])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            list(command or COMMAND),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._messages,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        self._requests = _Pipe(self._process.stdin, timeout)
        self._replies = io.BufferedReader(_Pipe(self._process.stdout, timeout), BUFFER)
        try:
            self.info, _ = self.request("open", folder=folder, threads=threads)
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> str:
        """ggml's version and commit."""
        return f"ggml {self.info['version']} ({self.info['commit']})"

    def add_weight(self, name: str, tensor: Any) -> str:
        """A tensor (.type, .shape, .data); returns the buffer type that it went to."""
        fields = {"name": name, "type": type_info(tensor.type).id, "type_name": tensor.type}
        reply, _ = self.request("weight", [np.asarray(tensor.data)], shape=list(tensor.shape), **fields)
        return str(reply["buffer"])

    def run(self, step: str = "total") -> float:
        """Seconds of one run of a step."""
        return float(self.request("run", step=step)[0]["seconds"])

    def result(self, step: str = "total") -> Array:
        """What the step's last run wrote, fp32."""
        return self.request("result", step=step)[1][0]

    def request(
        self, operation: str, arrays: Sequence[Array] = (), **fields: Any
    ) -> tuple[dict[str, Any], list[Array]]:
        """Sends a frame and waits for its reply."""
        try:
            write_frame(self._requests, {"op": operation, **fields}, arrays)
            reply, results = read_frame(self._replies)
        except (BrokenPipeError, EOFError):
            raise PeerError(f"[peer] expected an answer to {operation}, got {self._end()}") from None
        except TimeoutError:
            self._process.kill()
            raise PeerError(
                f"[peer] expected an answer to {operation} within {self.timeout:g} s, got none: stopped"
            ) from None
        except ValueError as error:
            self._process.kill()
            raise PeerError(f"[peer] expected an answer to {operation}, got another text: {error}") from None
        if not reply.get("ok"):
            raise PeerError(f"[peer: {operation}] {reply.get('error', 'expected an answer, got none')}")
        return reply, results

    def _end(self) -> str:
        """How the process ended, and the last that it said."""
        try:
            code = self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._messages.seek(0)
        lines = self._messages.read().decode(errors="replace").strip().splitlines()
        how = f"exit code {code}" if code >= 0 else f"its death by {signal.Signals(-code).name}"
        return f"{how}; it said: {' | '.join(lines[-3:])}" if lines else how

    def close(self) -> None:
        """Ends the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._messages.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Pipe(io.RawIOBase):
    """A pipe of which every read and write waits for a limited time; TimeoutError then."""

    def __init__(self, pipe: Any, timeout: float) -> None:
        super().__init__()
        self._pipe, self._timeout = pipe, timeout
        os.set_blocking(pipe.fileno(), False)

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        if not select.select([self._pipe], [], [], self._timeout)[0]:
            raise TimeoutError
        piece = os.read(self._pipe.fileno(), len(into))
        into[: len(piece)] = piece
        return len(piece)

    def write(self, data: Any) -> int:
        """All of it."""
        left = memoryview(data)
        while left:
            if not select.select([], [self._pipe], [], self._timeout)[1]:
                raise TimeoutError
            left = left[os.write(self._pipe.fileno(), left) :]
        return len(data)
