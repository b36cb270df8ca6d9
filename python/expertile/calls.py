"""Who may use a window's buffers, and when."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def check_callback(callback: Any, where: str) -> None:
    """Raises TypeError for what is no function; called, an async one does nothing."""
    if callback is None:
        return
    got = "" if callable(callback) else type(callback).__name__
    if not got and any(inspect.iscoroutinefunction(call) for call in (callback, type(callback).__call__)):
        got = "an async one"
    if got:
        raise TypeError(f"[{where}] expected None or a plain function, got {got}")


class Calls:
    """One call of a window at a time: other threads wait, a callback of the call that runs is refused.

    A window has one set of buffers: a token_mixer that ran another step of it would overwrite the streams that it was
    called for.

    Whether a callback waits for the very thread that waits for the window cannot be seen from here, but such a callback
    does not return: a call that has waited `patience` seconds for one and the same callback is refused.
    """

    patience = 600.0

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a call is made of others
        self._callback_since: float | None = None

    @contextmanager
    def one(self, where: str) -> Iterator[None]:
        """Holds the window for a call. Raises ValueError inside a callback of this window, RuntimeError behind one."""
        self._acquire(where)
        try:
            if self._callback_since is not None:
                raise ValueError(
                    f"[{where}] expected a call from outside this window's token_mixer and progress, got one from "
                    "inside: it would overwrite the streams of the call that runs; use a second window"
                )
            yield
        finally:
            self._lock.release()

    def _acquire(self, where: str) -> None:
        arrived = time.monotonic()
        left = self.patience
        while not self._lock.acquire(timeout=left):
            since = self._callback_since
            left = self.patience if since is None else max(arrived, since) + self.patience - time.monotonic()
            if left <= 0:
                raise RuntimeError(
                    f"[{where}] expected the callback that runs in this window to return within {self.patience:g} s, "
                    "got none: where a token_mixer or progress waits for this call, neither ends; use a second window"
                )

    def back(self, callback: Callable[..., Any], where: str, *arguments: Any) -> None:
        """Runs the caller's own code in the middle of a call. Raises TypeError where that only made a coroutine."""
        self._callback_since = time.monotonic()
        try:
            result = callback(*arguments)
        finally:
            self._callback_since = None
        if inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
            if inspect.iscoroutine(result):
                result.close()  # else Python warns that nobody awaits it
            got = type(result).__name__
            raise TypeError(f"[{where}] expected a function that is done when it returns, got {got} from it")
