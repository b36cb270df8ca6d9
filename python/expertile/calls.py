"""Who may use a window's buffers, and when."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
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
    called for. A callback that waits for another thread's call waits for ever; who waits for whom cannot be seen here.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a call is made of others
        self._in_callback = False

    @contextmanager
    def one(self, where: str) -> Iterator[None]:
        """Holds the window for a call. Raises ValueError inside a callback of this window."""
        with self._lock:
            if self._in_callback:
                raise ValueError(
                    f"[{where}] expected a call from outside this window's token_mixer and progress, got one from "
                    "inside: it would overwrite the streams of the call that runs; use a second window"
                )
            yield

    def back(self, callback: Callable[..., Any], where: str, *arguments: Any) -> None:
        """Runs the caller's own code in the middle of a call. Raises TypeError where that only made a coroutine."""
        self._in_callback = True
        try:
            result = callback(*arguments)
        finally:
            self._in_callback = False
        if inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
            if inspect.iscoroutine(result):
                result.close()  # else Python warns that nobody awaits it
            got = type(result).__name__
            raise TypeError(f"[{where}] expected a function that is done when it returns, got {got} from it")
