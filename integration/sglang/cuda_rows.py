"""Copies of strided rows between pinned host memory and a CUDA device, as one DMA each."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from kvtier.errors import ConfigError, CopyError
from kvtier.integration.sglang.movers import CopyRows


def cuda_copy_rows(device: torch.device) -> CopyRows:
    """CopyRows between `device` and pinned host memory, enqueued on the current stream.

    torch's own copy of strided host rows goes through a pageable copy and waits for it. Raises
    ConfigError when cuda-bindings, which SGLang installs with CUDA, is not there.
    """
    try:
        runtime = importlib.import_module("cuda.bindings.runtime")
    except ImportError as error:
        raise ConfigError(
            "kvtier's host pool needs cuda-bindings on a CUDA device; pip install cuda-python"
        ) from error

    def copy_rows(target: Tensor, source: Tensor) -> None:
        num_rows, row_bytes = source.shape
        (status,) = runtime.cudaMemcpy2DAsync(
            target.data_ptr(),
            target.stride(0),
            source.data_ptr(),
            source.stride(0),
            row_bytes,
            num_rows,
            runtime.cudaMemcpyKind.cudaMemcpyDefault,
            torch.cuda.current_stream(device).cuda_stream,
        )
        if status != runtime.cudaError_t.cudaSuccess:
            raise CopyError(f"a copy of {num_rows} rows of {row_bytes} bytes failed: {status}")

    return copy_rows
