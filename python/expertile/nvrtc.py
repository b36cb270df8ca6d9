"""Finds NVRTC, NVIDIA's run-time compiler, where pip put it, for the CUDA device."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

# Inside the namespace package `nvidia`, from the wheel nvidia-cuda-nvrtc of CUDA 13.
LIBRARY = "cu13/lib/libnvrtc.so.13"


def load_nvrtc() -> str | None:
    """Load the library of the wheel, where it is installed, so that the engine finds it by its bare name.

    return  -  str  its path; None where there is none (a system's own NVRTC is found without this)

    >>> load_nvrtc() == load_nvrtc()
    True
    """
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / LIBRARY
        if path.is_file():
            try:
                ctypes.CDLL(str(path))
            except OSError:
                continue
            return str(path)
    return None
