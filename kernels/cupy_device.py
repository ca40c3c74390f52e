"""CuPy where there is one: found when it is used, with one line about what is missing."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvtier.errors import CopyError
from kvtier.kernels.with_torch import torch

_INSTALL = "pip install 'kvtier[gpu]'"


def load_cupy() -> Any:
    """The module `cupy`.

    Raises CopyError when CuPy or NVRTC is not installed, or when there is no CUDA device.
    """
    try:
        cupy = importlib.import_module("cupy")
        cupy.cuda.nvrtc.getVersion()
    except ImportError as error:
        raise CopyError(f"CuPy is not installed or cannot be imported; {_INSTALL}") from error
    except RuntimeError as error:
        raise CopyError(f"CuPy finds no NVRTC library; {_INSTALL}") from error
    if not cupy.cuda.is_available():
        raise CopyError(
            "CuPy finds no CUDA device: no GPU, or no NVIDIA driver for it; use CpuCopy for host "
            "tensors, or check `nvidia-smi`"
        )
    return cupy


def check_cuda(device: torch.device) -> None:
    """Raise CopyError unless the device is a CUDA one."""
    if device.type != "cuda":
        raise CopyError(
            f"the pool is on {device}, CuPy sees CUDA tensors only; use CpuCopy for host tensors"
        )


@contextmanager
def on_current_stream(cupy: Any, device: torch.device) -> Iterator[None]:
    """Within it, CuPy launches on torch's current stream of a CUDA device."""
    current = _StreamOf(torch.cuda.current_stream(device))
    with cupy.cuda.Device(device.index), cupy.cuda.Stream.from_external(current):
        yield


class _StreamOf:
    """A torch stream by the CUDA stream protocol, which not every torch release speaks itself."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._stream.cuda_stream)
