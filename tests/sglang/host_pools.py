"""Device pools of SGLang for tests of the host pool, their bytes, and host pools of exact size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from torch import Tensor

from kvtier.integration.sglang.host_pool import PagedHostPool

WIPED = 0xEE
Pages = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Shape:
    """A device pool's layers; `v_head_dim` 0 makes it an MLA pool of rows of `head_dim` + 16."""

    dtype: torch.dtype
    page_size: int
    num_layers: int = 3
    head_num: int = 2
    head_dim: int = 32
    v_head_dim: int = 32

    @property
    def page_bytes(self) -> int:
        row = self.head_dim + 16
        if self.v_head_dim:
            row = self.head_num * (self.head_dim + self.v_head_dim)
        return self.page_size * self.num_layers * row * self.dtype.itemsize


def device_pool(shape: Shape, num_pages: int, device: str = "cpu") -> Any:
    """A pool of `num_pages` pages and SGLang's padding page."""
    common = {
        "size": num_pages * shape.page_size,
        "page_size": shape.page_size,
        "dtype": shape.dtype,
        "layer_num": shape.num_layers,
        "device": device,
        "enable_memory_saver": False,
    }
    if shape.v_head_dim:
        return MHATokenToKVPool(
            head_num=shape.head_num,
            head_dim=shape.head_dim,
            v_head_dim=shape.v_head_dim,
            **common,
        )
    return MLATokenToKVPool(kv_lora_rank=shape.head_dim, qk_rope_head_dim=16, **common)


def host_pool(pool: Any, page_size: int, num_bytes: int) -> PagedHostPool:
    """A host pool for which `num_bytes` are asked, whatever memory the machine has free."""
    with host_memory_budget_scope(1 << 30):
        return PagedHostPool(
            pool, page_size=page_size, hicache_ratio=1.0, hicache_size=num_bytes / 1e9
        )


def tensors(pool: Any) -> list[list[Tensor]]:
    """Each layer's tensors [slots, ...]."""
    if isinstance(pool, MLATokenToKVPool):
        return [[layer] for layer in pool.kv_buffer]
    return [list(kv) for kv in zip(pool.k_buffer, pool.v_buffer, strict=True)]


def as_bytes(tensor: Tensor) -> Tensor:
    """uint8[slots, bytes of a row], a view."""
    return tensor.view(tensor.shape[0], -1).view(torch.uint8)


def fill(pool: Any, seed: int = 0) -> None:
    """Random bytes, and a NaN in the first value of each slot's row."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in (tensor for layer in tensors(pool) for tensor in layer):
        rows = as_bytes(tensor)
        rows.copy_(torch.randint(0, 256, rows.shape, dtype=torch.uint8, generator=generator))
        if tensor.dtype.is_floating_point:
            tensor.view(tensor.shape[0], -1)[:, 0] = float("nan")


def wipe(pool: Any) -> None:
    """WIPED in every byte."""
    for tensor in (tensor for layer in tensors(pool) for tensor in layer):
        as_bytes(tensor).fill_(WIPED)


def snapshot(pool: Any) -> list[list[Tensor]]:
    """A copy, on the host, of all bytes of each layer's tensors."""
    return [[as_bytes(tensor).cpu().clone() for tensor in layer] for layer in tensors(pool)]


def equal(one: list[list[Tensor]], other: list[list[Tensor]]) -> bool:
    """Whether two snapshots have the same bytes."""
    pairs = [pair for a, b in zip(one, other, strict=True) for pair in zip(a, b, strict=True)]
    return all(torch.equal(a, b) for a, b in pairs)


def slots_of(pages: Pages, page_size: int) -> Tensor:
    """int64[len(pages) * page_size], as SGLang's allocators give them."""
    return torch.from_numpy((pages[:, None] * page_size + np.arange(page_size)).reshape(-1))


def packed_page(layers: list[list[Tensor]], page: int, page_size: int) -> Tensor:
    """The bytes of a page as the host pool is to hold them, from a snapshot."""
    slots = slice(page * page_size, (page + 1) * page_size)
    return torch.cat([tensor[slots].reshape(-1) for layer in layers for tensor in layer])
