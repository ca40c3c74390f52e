"""SGLang's host tier with whole pages side by side, copied by kvtier's kernels."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.base import (
    HICACHE_HOST_MEMORY_RESERVE_BYTES,
    HostKVCache,
    host_memory_budget_bytes,
    sync_fixed_hicache_size,
)
from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS
from torch import Tensor

from kvtier.errors import ConfigError, CopyError
from kvtier.integration.sglang.movers import (
    CpuMover,
    DevicePages,
    DmaMover,
    PageMover,
    page_ids,
)

_GIB = 1 << 30


class PagedHostPool(HostKVCache):
    """Host pages uint8[num_pages, page_bytes] for a plain MHA or MLA device pool.

    A page is `page_size` tokens of layer 0 K, layer 0 V, layer 1 K, ... (MLA: layer 0, layer 1,
    ...), and the pool holds exactly as many as were asked for, rounded down: `hicache_size` GB
    (1e9 bytes), or, where that is 0, `hicache_ratio` times the device pool's tokens. Memory is
    pinned with CUDA alone. Copies take token slots on the host ("direct" I/O backend). Raises
    ConfigError for a device pool of another kind, for less than one page, and for more host memory
    than SGLang lets be used.
    """

    # Pages in a store may have been written by SGLang's own pools: those must miss.
    storage_format_tag = "kvtier-page-first"

    def __init__(
        self,
        device_pool: Any,
        *,
        page_size: int,
        hicache_ratio: float,
        hicache_size: float,
        allocator_type: str = "default",
    ) -> None:
        layers = device_layers(device_pool)
        self._device_pages = DevicePages.of(layers, page_size)
        self.page_bytes = self._device_pages.pool.page_bytes
        self.layer_num = self.target_layer_num = len(layers)
        self._is_mla = len(layers[0]) == 1
        self._transfer_device = self._device_pages.pool.device
        size_per_token = self.page_bytes // page_size
        tokens = _tokens_asked_for(device_pool.size, size_per_token, hicache_ratio, hicache_size)
        num_pages = self._checked_pages(tokens, page_size)
        super().__init__(
            dtype=layers[0][0].dtype,
            device_capacity_tokens=device_pool.size,
            size_per_token=size_per_token,
            start_layer=device_pool.start_layer,
            end_layer=device_pool.end_layer,
            host_to_device_ratio=hicache_ratio,
            host_size=hicache_size,
            page_size=page_size,
            # The name under which SGLang hands host indices to a pool that wants them there.
            layout="page_first_direct",
            pin_memory=self._transfer_device.type == "cuda",
            device="cpu",
            allocator_type=allocator_type,
            host_token_capacity=num_pages * page_size,
        )
        self._mover: PageMover | None = _make_mover(self._device_pages, self.kv_buffer)

    def _checked_pages(self, tokens: int, page_size: int) -> int:
        num_pages = tokens // page_size
        if num_pages < 1:
            raise ConfigError(
                f"the host pool would hold {tokens} tokens, less than one page of {page_size} "
                f"({self.page_bytes} bytes); raise --hicache-size or --hicache-ratio"
            )
        needed, available = num_pages * self.page_bytes, host_memory_budget_bytes()
        if needed > available:
            raise ConfigError(
                f"the host pool needs {needed / 1e9:.3f} GB and {max(available, 0) / 1e9:.3f} GB "
                f"may be used, as SGLang keeps {HICACHE_HOST_MEMORY_RESERVE_BYTES / _GIB:.0f} GiB "
                "of host memory free; lower --hicache-size or --hicache-ratio, or free memory"
            )
        return num_pages

    def get_size_per_token(self) -> int:
        return self.page_bytes // int(self.page_size)

    def init_kv_buffer(self) -> Tensor:
        buffer: Tensor = ALLOC_MEMORY_FUNCS[self._transfer_device.type](
            (self.page_num, self.page_bytes),
            dtype=torch.uint8,
            device=self.device,
            pin_memory=self.pin_memory,
            allocator=self.allocator,
            registration_granularity_bytes=self.page_bytes,
        )
        return buffer

    def destroy(self) -> None:
        """Unpin and let go of the memory; later copies raise CopyError. May be called twice."""
        mover, self._mover = self._mover, None
        if mover is not None:
            mover.close()
            if self.pin_memory:
                torch.cuda.synchronize(self._transfer_device)
        super().destroy()

    def backup_from_device_all_layer(
        self, device_pool: Any, host_indices: Tensor, device_indices: Tensor, io_backend: str
    ) -> None:
        """Copy whole pages of the captured device pool down; slots, int64[n] each, on the host.

        Raises CopyError, with nothing written, for slots that are no whole pages or not in a pool.
        """
        host_pages = page_ids(host_indices, self.page_size)
        device_pages = page_ids(device_indices, self.page_size)
        self._live_mover().backup(device_pages, host_pages)

    def load_to_device_per_layer(
        self,
        device_pool: Any,
        host_indices: Tensor,
        device_indices: Tensor,
        layer_id: int,
        io_backend: str,
        *,
        is_draft: bool = False,
    ) -> None:
        """Copy the bytes of one layer up; see `backup_from_device_all_layer`."""
        if is_draft:
            raise CopyError("this host pool holds no draft layers")
        host_pages = page_ids(host_indices, self.page_size)
        device_pages = page_ids(device_indices, self.page_size)
        self._live_mover().load_layer(layer_id, host_pages, device_pages)

    def _live_mover(self) -> PageMover:
        if self._mover is None:
            raise CopyError("this host pool is destroyed")
        return self._mover

    def get_data_page(self, index: int | Tensor, flat: bool = True) -> Tensor:
        """The page that begins at slot `index`, in the KV's dtype: a copy that a store may keep.

        Always flat, since the rows of its segments may differ in shape.
        """
        return self._page(index).clone().view(self.dtype)

    def get_dummy_flat_data_page(self) -> Tensor:
        """A page of zeros for a store to read into, shaped as `get_data_page` gives it."""
        page = torch.zeros(self.page_bytes, dtype=torch.uint8, pin_memory=self.pin_memory)
        return page.view(self.dtype)

    def set_from_flat_data_page(self, index: int | Tensor, data_page: Tensor) -> None:
        """Overwrite the page that begins at slot `index`; CopyError when the bytes do not fit."""
        if data_page.nbytes != self.page_bytes:
            raise CopyError(f"a page is {self.page_bytes} bytes, not {data_page.nbytes}")
        self._page(index).copy_(data_page.contiguous().view(-1).view(torch.uint8))

    def get_page_buffer_meta(self, indices: Tensor) -> tuple[list[int], list[int]]:
        """Addresses and lengths in bytes for stores that read the pool itself.

        One object per MLA page. Stores keep two for other models, so that a page gives its halves.
        """
        cuts = [0, self.page_bytes] if self._is_mla else [0, self.page_bytes // 2, self.page_bytes]
        parts = list(pairwise(cuts))
        bases = [self._page(slot).data_ptr() for slot in indices[:: self.page_size]]
        addresses = [base + begin for base in bases for begin, _ in parts]
        return addresses, [end - begin for begin, end in parts] * len(bases)

    def _page(self, index: int | Tensor) -> Tensor:
        self._live_mover()
        page, offset = divmod(int(index), self.page_size)
        if offset or not 0 <= page < self.page_num:
            raise CopyError(f"slot {int(index)} begins no page of {self.page_size} in the pool")
        row: Tensor = self.kv_buffer[page]
        return row


def device_layers(device_pool: Any) -> list[list[Tensor]]:
    """The tensors [slots, ...] of each layer: K and V, or MLA's one.

    Raises ConfigError for a device pool whose pages are more, or lie otherwise, than in those.
    """
    refused = _refusal(device_pool)
    if refused is not None:
        raise ConfigError(
            f"kvtier's host pool cannot hold {refused}; it takes plain MHA and MLA pools: choose "
            "another model or KV cache flags, or start without --radix-cache-backend kvtier"
        )
    if isinstance(device_pool, MLATokenToKVPool):
        layers = [[layer] for layer in device_pool.kv_buffer]
    else:
        layers = [list(kv) for kv in zip(device_pool.k_buffer, device_pool.v_buffer, strict=True)]
    if not all(tensor.is_contiguous() for layer in layers for tensor in layer):
        raise ConfigError(
            "kvtier's host pool cannot hold strided KV; start without --enable-unified-memory"
        )
    return layers


def _refusal(pool: Any) -> str | None:
    """What of the device pool cannot be held, None where all can."""
    if type(pool) not in (MHATokenToKVPool, MLATokenToKVPool):
        return f"the KV of a {type(pool).__name__}"
    scales = ("k_scale_buffer", "v_scale_buffer", "kv_scale_buffer")
    traits = {
        "a pool without layers": pool.layer_num == 0,
        "layers sharded over ranks": pool.layer_shard_enabled,
        "KV whose slots move (unified memory)": pool.host_transfer_translate is not None
        or pool.host_capacity_tokens is not None,
        "quantized KV with scales": any(getattr(pool, name, None) is not None for name in scales),
        "sparse attention's KV": getattr(pool, "use_dsa", False),
        "KV in another layout than NHD": getattr(pool, "kv_cache_layout", "nhd") != "nhd",
        f"KV on {pool.device}": torch.device(pool.device).type not in ("cpu", "cuda"),
    }
    return next((trait for trait, found in traits.items() if found), None)


def _tokens_asked_for(
    device_tokens: int, size_per_token: int, hicache_ratio: float, hicache_size: float
) -> int:
    # By their decimal digits: 0.29 times 100 tokens is 29, which floats make 28.
    if hicache_size > 0:
        tokens = int(Fraction(str(hicache_size)) * 10**9) // size_per_token
        return int(sync_fixed_hicache_size(tokens, hicache_size))
    return int(Fraction(str(hicache_ratio)) * device_tokens)


def _make_mover(device: DevicePages, host: Tensor) -> PageMover:
    if device.pool.device.type == "cpu":
        return CpuMover(device, host)
    # Only here: triton and the CUDA libraries need not be there without a GPU.
    from kvtier.integration.sglang.cuda_rows import cuda_copy_rows
    from kvtier.kernels.triton_copy import TritonCopy

    # SGLang registers host memory in pieces of whole pages of at most this size.
    registered = max(envs.SGLANG_HICACHE_HOST_REGISTER_CHUNK_GB.get(), 1) * _GIB
    boundary = registered // device.pool.page_bytes
    return DmaMover(device, host, TritonCopy(), cuda_copy_rows(device.pool.device), boundary)
