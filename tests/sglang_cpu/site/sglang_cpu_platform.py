"""SGLang's out-of-tree platform for machines without a GPU: PyTorch's own operators, no kernels.

Found through the entry point in the `dist-info` folder beside this file, hence only by processes
that have the folder on their path. SGLang loads it in each of its processes.
"""

from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


def activate() -> str | None:
    """The class to use, or None where there is CUDA and SGLang needs no help."""
    import torch

    return None if torch.cuda.is_available() else f"{__name__}.CpuPlatform"


class CpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Every fused operator takes its native path, since the platform is not in SGLang's tree."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_compile_backend(self, mode: str | None = None) -> Any:
        return "eager"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False
