"""Fixtures of the CUDA tests: skipped, with the reason, where the machine has no GPU."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session")
def gpu() -> Any:
    """The CUDA device."""
    import expertile

    status = next((status for status in expertile.list_devices() if status.kind == "cuda"), None)
    if status is None or not status.present:
        pytest.skip(f"no CUDA device: {status.detail if status else 'this build has none'}")
    return expertile.open_device("cuda")


@pytest.fixture(scope="session")
def emulator() -> Any:
    import expertile

    return expertile.open_device("emulator")
