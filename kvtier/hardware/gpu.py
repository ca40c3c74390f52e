"""`GpuSpec` and its presets. Every figure is a published one; nothing here is measured."""

from dataclasses import dataclass

from kvtier.errors import UnknownNameError

_MIB = 2**20

_PCIE5_ONE_WAY_BYTES_PER_S = 50e9
_PCIE5_BOTH_WAYS_BYTES_PER_S = 83.4e9
_PCIE5_SOURCE = (
    "vLLM blog 2026-01-08: about 50 GB/s one way at 2 MB blocks, 83.4 GB/s in all with both "
    "directions at once, copy engines, H100 on PCIe 5 x16"
)


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One GPU and its link to host memory."""

    name: str
    hbm_bytes: int
    hbm_bandwidth_bytes_per_s: float
    bf16_flops: float
    """Dense bf16 operations per second."""
    fp8_flops: float
    """Dense fp8 operations per second."""
    link_bytes_per_s: float
    """Large pinned copy, one direction."""
    link_duplex_bytes_per_s: float
    """Large pinned copies in both directions at once, summed."""
    compute_source: str
    memory_source: str
    link_source: str


def _pcie5(
    name: str,
    hbm_bytes: int,
    bandwidth: float,
    flops: tuple[float, float],
    sources: tuple[str, str],
) -> GpuSpec:
    """A GPU on PCIe 5 x16; `flops` are (bf16, fp8), `sources` those of (compute, memory)."""
    return GpuSpec(
        name=name,
        hbm_bytes=hbm_bytes,
        hbm_bandwidth_bytes_per_s=bandwidth,
        bf16_flops=flops[0],
        fp8_flops=flops[1],
        link_bytes_per_s=_PCIE5_ONE_WAY_BYTES_PER_S,
        link_duplex_bytes_per_s=_PCIE5_BOTH_WAYS_BYTES_PER_S,
        compute_source=sources[0],
        memory_source=sources[1],
        link_source=_PCIE5_SOURCE,
    )


_HOPPER_FLOPS = (989e12, 1979e12)
_H200_SHEET = "NVIDIA H200 SXM data sheet: 989 / 1979 TFLOPS dense bf16 / fp8, 4.8 TB/s"

_PRESETS = (
    _pcie5(
        "H100",
        81_559 * _MIB,
        3.35e12,
        _HOPPER_FLOPS,
        (
            "NVIDIA H100 SXM data sheet: 989 / 1979 TFLOPS dense bf16 / fp8, 3.35 TB/s",
            "nvidia-smi: 81559 MiB",
        ),
    ),
    _pcie5(
        "H200",
        143_771 * _MIB,
        4.8e12,
        _HOPPER_FLOPS,
        (_H200_SHEET, "nvidia-smi: 143771 MiB"),
    ),
    _pcie5(
        "H200-80GB",
        80_000_000_000,
        4.8e12,
        _HOPPER_FLOPS,
        (_H200_SHEET, "MORI section 6.1: an H200 capped to 80 GB stands for an H100"),
    ),
    _pcie5(
        "B200",
        183_359 * _MIB,
        7.67e12,
        (2.25e15, 4.5e15),
        (
            "NVIDIA HGX B200 data sheet: 2.25 / 4.5 PFLOPS dense bf16 / fp8 per GPU, 8 TB/s; "
            "7.67 TB/s as the driver reports it (pytorch/ao 4002)",
            "nvidia-smi: 183359 MiB",
        ),
    ),
)


def known_gpus() -> tuple[str, ...]:
    """The names of the presets."""
    return tuple(gpu.name for gpu in _PRESETS)


def load_gpu(name: str) -> GpuSpec:
    """The preset `name`, letter case aside. Raises UnknownNameError."""
    for gpu in _PRESETS:
        if gpu.name.lower() == name.lower():
            return gpu
    raise UnknownNameError("GPU", name, known_gpus())
