"""The Mixture-of-Experts half of LLM prefill on quantized GGUF weights.

>>> import expertile
>>> [d.kind for d in expertile.list_devices() if d.kind == "cpu"]
['cpu']
"""

from expertile._core import GGUFError, __commit__, __version__
from expertile.device import Device, list_devices, open_device
from expertile.device_array import DeviceArray
from expertile.model import Model, open_gguf
from expertile.route_error import RouteError
from expertile.window import Window

__all__ = [
    "Device",
    "DeviceArray",
    "GGUFError",
    "Model",
    "RouteError",
    "Window",
    "__commit__",
    "__version__",
    "list_devices",
    "open_device",
    "open_gguf",
]
