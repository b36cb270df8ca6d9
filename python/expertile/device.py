"""The devices that run the kernels.

A `Device` has `.kind` and `.name`; its memory is best taken through `DeviceArray`. One device serves any number of
windows.
"""

from __future__ import annotations

from expertile import _core
from expertile._core import Device, DeviceStatus
from expertile.arrays import flag, text, whole
from expertile.nvrtc import load_nvrtc

__all__ = ["Device", "DeviceStatus", "list_devices", "open_device"]

MAX_THREADS = 65536
# Best first. To ask which are present costs more: it starts the drivers.
DEVICE_KINDS = ("metal", "cuda", "cpu", "emulator")


def list_devices() -> list[DeviceStatus]:
    """Every kind of device, best first: `.kind`, `.present`, and `.detail`, its name or why it is absent.

    >>> {d.kind: d.present for d in list_devices()}["emulator"]
    True
    """
    load_nvrtc()
    return list(_core.list_devices())


def open_device(
    kind: str | None = None,
    threads: int = 0,
    order: str = "",
    seed: int = 0,
    guard: bool = False,
    stream: int | None = None,
    instructions: str = "",
    matrix: str = "",
) -> Device:
    """Opens a device. order, seed and guard have no effect on other kinds; the other options are refused there.

    kind     "metal", "cuda", "cpu" or "emulator"; None = the best that is present
    threads  worker threads of cpu and emulator; 0 = as many as this process may use. Results do not depend on it.
    order    emulator: the order in which threads and threadgroups run, "ascending", "reversed" or "shuffled"
    seed     emulator: seed of the shuffled order
    guard    cpu, emulator: new buffers start as garbage, with guard words around them, checked after each run
    stream   cuda: handle of the caller's CUDA stream (torch: `torch.cuda.current_stream().cuda_stream`) on which all
             work is then put, behind what is on it already; the caller keeps it as long as the device. It names the
             GPU, too. None = a stream of the device's own on the first GPU.
    instructions  cpu: "avx512+amx", "amx", "avx512", "avx2", "neon" or "portable"; "" = the first of these that this
             machine has. They change nothing but the order of a GEMM's sum, and that only where AMX tiles multiply (in
             the precision bf16, with "amx" in both); all others agree bit for bit.
    matrix   metal: what multiplies matrices: "base" (simdgroup_matrix), or matmul2d with its weights "staged" or, by
             "k4", straight in registers, on GPUs with neural accelerators (M5) and macOS 26.2; "" = staged where that
             compiles, else base, with one RuntimeWarning. No Mac has run any of them.

    Raises ValueError for an unknown kind, an option of another kind of device or instructions that this machine
    lacks (naming those it has), TypeError for an option of another type, RuntimeError where the device is absent or
    lacks what `matrix` needs, saying why.

    >>> open_device("cpu", threads=1).kind
    'cpu'
    """
    if kind is None:
        kind = next(status.kind for status in list_devices() if status.present)
    kind, order = text(kind, "open_device: kind"), text(order, "open_device: order")
    instructions, matrix = text(instructions, "open_device: instructions"), text(matrix, "open_device: matrix")
    if instructions and kind != "cpu":
        raise ValueError(f"[open_device: instructions] expected the device cpu, got {kind}")
    if matrix and kind != "metal":
        raise ValueError(f"[open_device: matrix] expected the device metal, got {kind}")
    if matrix and stream is not None:
        raise ValueError(f"[open_device: metal] expected no stream, got {stream}")
    if matrix:
        return _core.open_metal_device(matrix)
    threads = whole(threads, 0, MAX_THREADS, "open_device: threads")
    seed = whole(seed, 0, 2**64 - 1, "open_device: seed")
    guard = flag(guard, "open_device: guard")
    if stream is not None:
        stream = whole(stream, 0, 2**64 - 1, "open_device: stream")
    if kind == "cuda":
        load_nvrtc()
    return _core.open_device(
        kind, threads=threads, order=order, seed=seed, guard=guard, stream=stream, instructions=instructions
    )
