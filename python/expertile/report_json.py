"""The JSON that every command writes with `--json FILE`.

    {"command", "ok", "version", "commit", "machine": {...}, "device": {"name", "kind"}, "rows": [...]}

A command may add fields of its own at the top (`prefill`: tokens_per_s, peak_rss_bytes).
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import expertile

ENVELOPE = ("command", "ok", "version", "commit", "machine", "device", "rows")


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    return {
        "cpu": _cpu_name(),
        "cores": usable_cores(),
        "memory_bytes": _memory_bytes("MemTotal"),
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def usable_cores() -> int:
    """Cores that this process may use, which can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_bytes() -> int | None:
    """Memory that can still be taken, None where the system does not say."""
    return _memory_bytes("MemAvailable")


def _memory_bytes(field: str) -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    if field == "MemTotal" and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "Model")):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def peak_rss_bytes() -> int:
    """The largest resident size of this process so far."""
    try:
        # VmHWM, because ru_maxrss also remembers the process that started this one.
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024


def envelope(
    command: str,
    ok: bool,
    rows: Sequence[Mapping[str, Any]],
    device: Any = None,
    top: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The whole document. `device` is an open Device, or None where a command uses none or several."""
    document: dict[str, Any] = {
        "command": command,
        "ok": bool(ok),
        "version": expertile.__version__,
        "commit": expertile.__commit__,
        "machine": machine(),
        "device": None if device is None else {"name": device.name, "kind": device.kind},
    }
    for key, value in (top or {}).items():
        if key in ENVELOPE:
            raise ValueError(f"[report] expected a field besides {', '.join(ENVELOPE)}, got {key}")
        document[key] = value
    document["rows"] = [dict(row) for row in rows]
    return document


def write(path: str | os.PathLike[str], document: Mapping[str, Any]) -> None:
    """Writes strict JSON: NaN and infinities become null."""
    Path(path).write_text(json.dumps(_plain(document), indent=1, allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
