"""Fixtures of the tests on the stand-in for Metal: skipped, with the reason, in a build that has none."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def standin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in's own module, its settings as they are by default, and a cache directory of this test's own."""
    from expertile import _core

    if not hasattr(_core, "metal_standin"):
        pytest.skip("this build has no stand-in for Metal: build with EXPERTILE_METAL_STANDIN=ON")
    module = _core.metal_standin
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    module.reset()
    module.take_faults()
    yield module
    gc.collect()
    module.reset()
    assert module.take_faults() == []
