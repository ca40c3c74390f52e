"""What any backend must do with a case, on any device; compared as bytes over all the memory."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtier.kernels.backend import CopyBackend
from kvtier.kernels.naive import gather_naive, page_checksums, scatter_naive
from kvtier.kernels.pool import PagedPool

from .cases import Case, build, poisoned_packed, snapshot

_SUM_POISON = -0x0123456789ABCDEF


def check_gather(backend: CopyBackend, case: Case, device: str, *, sums: bool) -> None:
    """The packed pages and sums are right; guards around them and the pool keep their bytes."""
    source, _, ids = build(case, device)
    before = snapshot(case, source)
    whole, packed = _guarded(len(ids), source)
    expected_whole, expected = _guarded(len(ids), source)
    gather_naive(source, torch.from_numpy(ids), expected)
    checksums = _poisoned_sums(len(ids), device) if sums else None
    backend.gather(source, ids, packed, checksums=checksums)
    assert torch.equal(whole.cpu(), expected_whole.cpu())
    assert torch.equal(snapshot(case, source), before)
    if checksums is not None:
        assert torch.equal(checksums.cpu(), _sums(packed))


def check_scatter(backend: CopyBackend, case: Case, device: str, *, sums: bool) -> None:
    """The pages of the ids hold the packed bytes; gaps, other pages and packed keep theirs."""
    ids = torch.tensor(case.unique_ids, dtype=torch.int64)
    source, target, _ = build(case, device)
    whole, packed = _guarded(len(ids), source)
    gather_naive(source, ids, packed)
    scatter_naive(target, ids, packed)
    expected = snapshot(case, target)
    del source, target
    _, target, _ = build(case, device)
    before = whole.clone()
    checksums = _poisoned_sums(len(ids), device) if sums else None
    backend.scatter(target, case.unique_ids, packed, checksums=checksums)
    assert torch.equal(snapshot(case, target), expected)
    assert torch.equal(whole, before)
    if checksums is not None:
        assert torch.equal(checksums.cpu(), _sums(packed))


def check_parts(backend: CopyBackend, case: Case, device: str) -> None:
    """Segment by segment equals all at once, and the sums of the parts add up to the page's."""
    ids = torch.tensor(case.unique_ids, dtype=torch.int64)
    source, target, _ = build(case, device)
    expected = torch.empty(len(ids), source.page_bytes, dtype=torch.uint8, device=device)
    gather_naive(source, ids, expected)
    _, packed = _guarded(len(ids), source)
    total = torch.zeros(len(ids), dtype=torch.int64, device=device)
    for segment in range(source.num_segments):
        sums = _poisoned_sums(len(ids), device)
        untouched = source.offset_bytes[segment] + source.row_bytes[segment]
        later = packed[:, untouched:].clone()
        backend.gather(source.segments(segment, 1), case.unique_ids, packed, checksums=sums)
        assert torch.equal(packed[:, untouched:], later)
        total += sums
        backend.scatter(target.segments(segment, 1), case.unique_ids, packed)
    assert torch.equal(packed, expected)
    assert torch.equal(total.cpu(), _sums(packed))
    landed = torch.empty_like(expected)
    gather_naive(target, ids, landed)
    assert torch.equal(landed, expected)


def _guarded(num_ids: int, pool: PagedPool) -> tuple[Tensor, Tensor]:
    """A poisoned buffer with a row too many at each end, and the rows between, as `packed`."""
    whole = poisoned_packed(num_ids + 2, pool)
    return whole, whole[1:-1]


def _poisoned_sums(num_ids: int, device: str) -> Tensor:
    return torch.full((num_ids,), _SUM_POISON, dtype=torch.int64, device=device)


def _sums(packed: Tensor) -> Tensor:
    return torch.from_numpy(page_checksums(packed.cpu().numpy()))
