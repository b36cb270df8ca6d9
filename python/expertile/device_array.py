"""Arrays in a device's memory, a caller's own among them, and a window's run on them without a copy to the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from expertile.arrays import fits, flag, instance, listed, shape_text, shown, whole
from expertile.device import Device
from expertile.route_error import RouteError

if TYPE_CHECKING:
    from expertile.window import Window


class DeviceArray:
    """A C-contiguous array in a device's memory.

    device    the Device whose kernels see it
    address   where it begins: a pointer of the GPU on cuda, a GPU address inside one of the device's buffers on metal,
              a host pointer on cpu and emulator
    shape, dtype
    owner     whatever must live as long as the array; the memory stays the owner's
    writable  False where a window must not write it

    Raises ValueError for memory that is not this device's or is shorter than the array.

    On cuda it has `__cuda_array_interface__`: `torch.as_tensor(array, device="cuda")` shares the memory.

    >>> import expertile
    >>> cpu, values = expertile.open_device("cpu"), np.arange(6, dtype=np.float32)
    >>> DeviceArray(cpu, values.ctypes.data, (2, 3), np.float32, owner=values).numpy()
    array([[0., 1., 2.],
           [3., 4., 5.]], dtype=float32)
    """

    def __init__(
        self,
        device: Device,
        address: int,
        shape: Sequence[int],
        dtype: Any,
        owner: Any = None,
        writable: bool = True,
    ) -> None:
        self.device: Device = instance(device, Device, "a Device", "DeviceArray: device")
        self.shape, self.dtype, self.nbytes = array_size(shape, dtype)
        self.owner = owner
        self.writable = flag(writable, "DeviceArray: writable")
        self.address = whole(address, 0, 2**64 - 1, "DeviceArray: address")
        # None: an array of no elements has no memory.
        self.buffer = device.adopt(self.address, self.nbytes) if self.nbytes else None

    @classmethod
    def empty(cls, device: Device, shape: Sequence[int], dtype: Any) -> DeviceArray:
        """New memory of the device, with any content."""
        instance(device, Device, "a Device", "DeviceArray: device")
        owner = device.alloc(max(array_size(shape, dtype)[2], 1))
        return cls(device, owner.address, shape, dtype, owner)

    @classmethod
    def of(cls, device: Device, array: Any, where: str) -> DeviceArray:
        """`array`, a DeviceArray or one with `__cuda_array_interface__`, as an array of `device`. Raises ValueError."""
        if isinstance(array, cls):
            if array.device is not device and array.device.kind != device.kind:
                raise ValueError(f"[{where}] expected an array of {device.kind}, got one of {array.device.kind}")
            return array
        if device.kind != "cuda":
            raise ValueError(f"[{where}] expected an array that {device.kind} can read, got one of a GPU")
        fields = array.__cuda_array_interface__
        shape, dtype = tuple(fields["shape"]), np.dtype(fields["typestr"])
        strides = fields.get("strides")
        if strides is not None and tuple(strides) != contiguous_strides(shape, dtype.itemsize):
            raise ValueError(f"[{where}] expected a C-contiguous array, got strides {tuple(strides)} of {list(shape)}")
        address, read_only = fields["data"]
        return cls(device, address or 0, shape, dtype, array, not read_only)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.device.kind != "cuda":
            raise AttributeError(f"an array of {self.device.kind} has no __cuda_array_interface__")
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address if self.nbytes else 0, not self.writable),
            "strides": None,
            "version": 3,
            "stream": None,  # what is in it is there: no stream to wait for
        }

    def numpy(self) -> np.ndarray:
        """A copy in the host's memory."""
        array = np.empty(self.shape, self.dtype)
        if self.buffer is not None:
            self.device.wait_for_caller()
            self.device.read(self.buffer, array)
        return array

    def __repr__(self) -> str:
        return f"<DeviceArray of {self.device.kind}: {self.dtype} {list(self.shape)}>"


def array_size(shape: Sequence[int], dtype: Any) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """The shape as whole numbers, the type, and the bytes of both, which do not wrap. Raises TypeError, ValueError."""
    items = listed(shape, "a sequence of sizes", "DeviceArray: shape")
    sizes = tuple(whole(n, 0, 2**62, "DeviceArray: shape") for n in items)
    try:
        kind = np.dtype(dtype)
    except (TypeError, ValueError):
        raise TypeError(f"[DeviceArray: dtype] expected a NumPy type, got {shown(dtype)}") from None
    if kind.hasobject:
        raise ValueError(f"[DeviceArray: dtype] expected plain numbers, got {kind}")
    nbytes = math.prod(sizes) * kind.itemsize
    if nbytes >= 2**62:
        raise ValueError(f"[DeviceArray: shape] expected less than 2^62 bytes, got {nbytes} of {list(sizes)}")
    return sizes, kind, nbytes


def contiguous_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Bytes from one element to the next, by dimension, where nothing lies between.

    >>> contiguous_strides((2, 3, 4), itemsize=4)
    (48, 16, 4)
    """
    strides: list[int] = []
    for size in reversed(shape):
        strides.insert(0, itemsize)
        itemsize *= size
    return tuple(strides)


def is_device_array(array: Any) -> bool:
    """Does it lie in a device's memory, by its own word?"""
    return isinstance(array, DeviceArray) or hasattr(array, "__cuda_array_interface__")


def check_streams(array: DeviceArray, shape: Sequence[int | None], where: str) -> None:
    """Raises ValueError unless the array is fp32 of this shape; None stands for any size."""
    if array.dtype != np.float32 or not fits(array.shape, shape):
        raise ValueError(f"[{where}] expected float32 {shape_text(shape)}, got {array.dtype} {list(array.shape)}")


def result_array(window: Window, out: Any, shape: tuple[int, ...], where: str) -> DeviceArray:
    """Where a window's result goes: `out` as a DeviceArray, or a new one. Raises TypeError, ValueError."""
    if out is None:
        return DeviceArray.empty(window.device, shape, np.float32)
    if not is_device_array(out):
        raise TypeError(f"[{where}: out] expected an array of the device, like x, got {type(out).__name__}")
    target = DeviceArray.of(window.device, out, f"{where}: out")
    check_streams(target, shape, f"{where}: out")
    if not target.writable:
        raise ValueError(f"[{where}: out] expected a writable array, got a read-only one")
    return target


def run_on_device(
    window: Window,
    layers: Sequence[int],
    x: Any,
    out: Any,
    token_mixer: Callable[[int, Any], None] | None,
    progress: Callable[[int, int], None] | None,
    where: str,
) -> Any:
    """Window._run where x lies in the device's memory. Returns `out`, or a new DeviceArray."""
    device, core, config = window.device, window._core, window.config
    source = DeviceArray.of(device, x, where)
    check_streams(source, (None, config.n_streams, config.dim), where)
    n_tokens = source.shape[0]
    if n_tokens > window.max_tokens:
        raise ValueError(f"[{where}] expected at most {window.max_tokens} tokens (max_tokens), got {n_tokens}")
    target = result_array(window, out, source.shape, where)
    if n_tokens > 0:
        with window._calls.one(where):
            streams = core.buffer("streams")
            view = DeviceArray(device, streams.address, source.shape, np.float32, streams)
            device.wait_for_caller()
            device.copy(streams, source.buffer, source.nbytes)
            core.clear_faults(n_tokens)
            for layer in layers:
                if token_mixer is not None:
                    window._calls.back(token_mixer, f"{where}: token_mixer", layer, view)
                    device.wait_for_caller()
                core.moe_layer(layer, n_tokens)
                if progress is not None:
                    window._calls.back(progress, f"{where}: progress", layer, len(layers))
            faults = core.route_faults(n_tokens)
            device.copy(target.buffer, streams, target.nbytes)
            nan = np.full(source.shape[1:], np.nan, np.float32)
            for token in faults:
                device.write(target.buffer, nan, token * nan.nbytes)
        if faults:
            raise RouteError(faults)
    return target if out is None else out
