"""Who may use a window's buffers, and when."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Calls:
    """One call of a window at a time: other threads wait, a callback of the call that runs is refused.

    A window has one set of buffers: a token_mixer that ran another step of it would overwrite the streams that it was
    called for.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a call is made of others
        self._in_callback = False

    @contextmanager
    def one(self, where: str) -> Iterator[None]:
        """Holds the window for a call. Raises ValueError inside a callback of this window."""
        with self.lock:
            if self._in_callback:
                raise ValueError(
                    f"[{where}] expected a call from outside this window's token_mixer and progress, got one from "
                    "inside: it would overwrite the streams of the call that runs; use a second window"
                )
            yield

    @contextmanager
    def callback(self) -> Iterator[None]:
        """While the caller's own code runs in the middle of a call."""
        self._in_callback = True
        try:
            yield
        finally:
            self._in_callback = False
