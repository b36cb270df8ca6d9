"""ggml's shared libraries through ctypes: only what one layer of experts needs. Source: ggml's public headers."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

POINTER = ctypes.c_void_p
CPU_DEVICE = 0  # GGML_BACKEND_DEVICE_TYPE_CPU
GRAPH_SIZE = 2048  # nodes

# name -> (result, arguments)
FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_version": (ctypes.c_char_p, ()),
    "ggml_commit": (ctypes.c_char_p, ()),
    "ggml_type_name": (ctypes.c_char_p, (ctypes.c_int,)),
    "ggml_blck_size": (ctypes.c_int64, (ctypes.c_int,)),
    "ggml_type_size": (ctypes.c_size_t, (ctypes.c_int,)),
    "ggml_free": (None, (POINTER,)),
    "ggml_tensor_overhead": (ctypes.c_size_t, ()),
    "ggml_graph_overhead_custom": (ctypes.c_size_t, (ctypes.c_size_t, ctypes.c_bool)),
    "ggml_new_graph_custom": (POINTER, (POINTER, ctypes.c_size_t, ctypes.c_bool)),
    "ggml_new_tensor_2d": (POINTER, (POINTER, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)),
    "ggml_new_tensor_3d": (POINTER, (POINTER, ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)),
    "ggml_nbytes": (ctypes.c_size_t, (POINTER,)),
    "ggml_set_output": (None, (POINTER,)),
    "ggml_mul_mat": (POINTER, (POINTER, POINTER, POINTER)),
    "ggml_mul_mat_id": (POINTER, (POINTER, POINTER, POINTER, POINTER)),
    "ggml_swiglu_split": (POINTER, (POINTER, POINTER, POINTER)),
    "ggml_mul": (POINTER, (POINTER, POINTER, POINTER)),
    "ggml_add": (POINTER, (POINTER, POINTER, POINTER)),
    "ggml_cont": (POINTER, (POINTER, POINTER)),
    "ggml_view_2d": (
        POINTER,
        (POINTER, POINTER, ctypes.c_int64, ctypes.c_int64, ctypes.c_size_t, ctypes.c_size_t),
    ),
    "ggml_build_forward_expand": (None, (POINTER, POINTER)),
    "ggml_backend_load_all_from_path": (None, (ctypes.c_char_p,)),
    "ggml_backend_dev_by_type": (POINTER, (ctypes.c_int,)),
    "ggml_backend_dev_init": (POINTER, (POINTER, ctypes.c_char_p)),
    "ggml_backend_dev_backend_reg": (POINTER, (POINTER,)),
    "ggml_backend_dev_buffer_type": (POINTER, (POINTER,)),
    "ggml_backend_dev_supports_op": (ctypes.c_bool, (POINTER, POINTER)),
    "ggml_backend_reg_get_proc_address": (POINTER, (POINTER, ctypes.c_char_p)),
    "ggml_backend_buft_name": (ctypes.c_char_p, (POINTER,)),
    "ggml_backend_alloc_ctx_tensors_from_buft": (POINTER, (POINTER, POINTER)),
    "ggml_backend_buffer_free": (None, (POINTER,)),
    "ggml_backend_tensor_set": (None, (POINTER, POINTER, ctypes.c_size_t, ctypes.c_size_t)),
    "ggml_backend_tensor_get": (None, (POINTER, POINTER, ctypes.c_size_t, ctypes.c_size_t)),
    "ggml_gallocr_new": (POINTER, (POINTER,)),
    "ggml_gallocr_free": (None, (POINTER,)),
    "ggml_gallocr_alloc_graph": (ctypes.c_bool, (POINTER, POINTER)),
    "ggml_backend_graph_compute": (ctypes.c_int, (POINTER, POINTER)),
}


class InitParams(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", POINTER), ("no_alloc", ctypes.c_bool))


class Feature(ctypes.Structure):
    """ggml_backend_feature; a null name ends the list."""

    _fields_ = (("name", ctypes.c_char_p), ("value", ctypes.c_char_p))


class Ggml:
    """The libraries of a folder, and its CPU backend with a number of threads."""

    def __init__(self, folder: str, threads: int) -> None:
        self._libraries = [_load(Path(folder), name) for name in ("ggml-base", "ggml-cpu", "ggml")]
        for name, (result, arguments) in FUNCTIONS.items():
            function = self._find(name)
            function.restype, function.argtypes = result, list(arguments)
            setattr(self, name.removeprefix("ggml_"), function)
        self._init = self._find("ggml_init")
        self._init.restype, self._init.argtypes = POINTER, [InitParams]
        self.device = self.call("backend_dev_by_type", CPU_DEVICE)
        if not self.device:  # a build with its backends as plug-ins
            self.call("backend_load_all_from_path", str(folder).encode())
            self.device = self.call("backend_dev_by_type", CPU_DEVICE)
        if not self.device:
            raise RuntimeError(f"[ggml] expected a CPU backend in {folder}, got none")
        self.backend = self.call("backend_dev_init", self.device, None)
        set_threads = ctypes.CFUNCTYPE(None, POINTER, ctypes.c_int)(self._proc("ggml_backend_set_n_threads"))
        set_threads(self.backend, threads)

    def call(self, name: str, *arguments: Any) -> Any:
        """A function by its name without `ggml_`."""
        return getattr(self, name)(*arguments)

    def context(self, tensors: int, graphs: int = 0) -> int:
        """A context for so many tensors and graphs, none of whose data it holds."""
        size = tensors * self.call("tensor_overhead") + graphs * self.call("graph_overhead_custom", GRAPH_SIZE, False)
        context = self._init(InitParams(size, None, True))
        if not context:
            raise RuntimeError("[ggml] expected a context, got none")
        return int(context)

    def weight_buffer_types(self) -> list[int]:
        """Where weights may lie, best first: the CPU's extra buffer types (repacked weights), then its plain memory."""
        address = self._proc("ggml_backend_dev_get_extra_bufts", required=False)
        types = []
        if address:
            extra = ctypes.CFUNCTYPE(ctypes.POINTER(POINTER), POINTER)(address)(self.device)
            index = 0
            while extra and extra[index]:
                types.append(int(extra[index]))
                index += 1
        return [*types, int(self.call("backend_dev_buffer_type", self.device))]

    def features(self) -> list[str]:
        """The instruction sets and options that the build uses, as it says itself."""
        address = self._proc("ggml_backend_get_features", required=False)
        names = []
        if address:
            entries = ctypes.CFUNCTYPE(ctypes.POINTER(Feature), POINTER)(address)(self._registry())
            index = 0
            while entries and entries[index].name:
                if entries[index].value != b"0":
                    names.append(entries[index].name.decode())
                index += 1
        return names

    def _registry(self) -> Any:
        return self.call("backend_dev_backend_reg", self.device)

    def _proc(self, name: str, required: bool = True) -> Any:
        address = self.call("backend_reg_get_proc_address", self._registry(), name.encode())
        if not address and required:
            raise RuntimeError(f"[ggml] expected the function {name}, got none: too old a ggml?")
        return address

    def _find(self, name: str) -> Any:
        for library in self._libraries:
            if hasattr(library, name):
                return getattr(library, name)
        raise RuntimeError(f"[ggml] expected the function {name}, got none: too old a ggml?")


def _load(folder: Path, name: str) -> ctypes.CDLL:
    """A shared library by its stem; its symbols serve the libraries loaded after it."""
    patterns = {"darwin": (f"lib{name}.dylib", f"lib{name}.so"), "win32": (f"{name}.dll", f"lib{name}.dll")}
    names = patterns.get(sys.platform, (f"lib{name}.so", f"lib{name}.so.0"))
    for file in names:
        if (folder / file).exists():
            return ctypes.CDLL(str(folder / file), mode=ctypes.RTLD_GLOBAL)
    raise RuntimeError(f"[ggml] expected {names[0]} in {folder}, got none")
