"""HBM's pages as arrays of other libraries, without a copy."""

from __future__ import annotations

from typing import Any

from kvtier.errors import ConfigError
from kvtier.memory.device_pool import DevicePool

_LIBRARIES = ("torch", "numpy", "cupy")


def segment_views(device: DevicePool, library: str) -> list[Any]:
    """uint8[num_pages, row] per segment; whoever writes to one writes to the pool.

    Raises ConfigError for another library, and where it cannot see the device's memory.
    """
    if library not in _LIBRARIES:
        raise ConfigError(f"library={library!r}; use one of {', '.join(_LIBRARIES)}")
    tensors, kind = device.pool.tensors, device.pool.device.type
    if library == "torch":
        return list(tensors)
    if library == "numpy":
        if kind != "cpu":
            raise ConfigError(f"the pool is on {kind}, which NumPy cannot see; use cupy or torch")
        return [tensor.numpy() for tensor in tensors]
    if kind != "cuda":
        raise ConfigError(f"the pool is on {kind}, which CuPy cannot see; use numpy or torch")
    import cupy  # an extra

    return [cupy.from_dlpack(tensor) for tensor in tensors]
