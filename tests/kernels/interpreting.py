"""What the tests share that run kernels in Triton's interpreter (`interpreter_*.py`).

They need a process of their own with TRITON_INTERPRET=1, since Triton reads the variable when a
kernel is decorated: `test_processes.py` starts them. By hand:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreter_gather.py

A program takes about a millisecond: cases are small.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import triton
from _pytest.mark import ParameterSet
from torch import Tensor

from kvtier.kernels.forms import Form, choose_form
from kvtier.kernels.naive import gather_naive, page_checksums
from kvtier.kernels.pool import PagedPool
from kvtier.kernels.triton_copy import interpreted

from .cases import CASES, Case, position_pattern

GUARD_BYTES = 64
_MAP_NORESERVE = 0x4000  # Linux; the mmap module of Python 3.11 has no name for it
_SUM_POISON = -0x0123456789ABCDEF

BY_NAME = {case.name: case for case in CASES}


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


# Triton 3.6 turns run-time loop bounds into integers in a way that NumPy 2.4 refuses.
skip_bad_pair = pytest.mark.skipif(
    _version(triton.__version__) <= (3, 6) and _version(np.__version__) >= (2, 4),
    reason=f"the interpreter of triton {triton.__version__} fails with numpy {np.__version__}; "
    "needs triton 3.7 or numpy 2.3",
)


def require_interpreter() -> None:
    """Stop the collection of a test file in a process that does not interpret kernels."""
    if not interpreted():
        raise pytest.UsageError("these tests need a process with TRITON_INTERPRET=1")


@contextmanager
def address_space_for(case: Case) -> Iterator[None]:
    """Skips the test where the system refuses the memory map of a far pool."""
    try:
        yield
    except OSError as error:
        if not case.is_far:
            raise
        pytest.skip(f"no address space for a pool of {case.pool_bytes} bytes: {error}")


def untouched(num_pages: int, row_bytes: int) -> Tensor:
    """uint8[num_pages, row_bytes] of zeros that take no memory until written.

    Skips the test where the system refuses so large a map.
    """
    num_bytes = num_pages * row_bytes
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        memory = mmap.mmap(-1, num_bytes, flags=flags)
    except OSError as error:
        pytest.skip(f"no address space for {num_bytes} bytes: {error}")
    return torch.frombuffer(memory, dtype=torch.uint8).view(num_pages, row_bytes)


def forms_of(case: Case) -> list[Form]:
    """Every form that copies the rows of the case."""
    rows = {_row_bytes(dtype, shape) for dtype, shape in case.typed}
    if len(rows) > 1:
        return [Form.MIXED]
    natural = choose_form(rows.pop())
    return [form for form in Form if form is not Form.SMALL or natural is Form.SMALL]


def cases_by_form(*names: str) -> list[ParameterSet]:
    """Parameters (case, form): the named cases, or all, in every form that copies their rows."""
    unknown = set(names) - {case.name for case in CASES}
    assert not unknown, f"no cases {sorted(unknown)}"
    return [
        pytest.param(case, form, id=f"{case.name}-{form}")
        for case in CASES
        if not names or case.name in names
        for form in forms_of(case)
    ]


def _row_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return int(np.prod(shape)) * dtype.itemsize


@dataclass
class Packed:
    """A packed buffer of pattern bytes with a guard on each side."""

    whole: Tensor
    """uint8[GUARD_BYTES + num_ids * page_bytes + GUARD_BYTES]"""
    rows: Tensor
    """uint8[num_ids, page_bytes], a view"""


def guarded(num_ids: int, pool: PagedPool, lead_bytes: int = GUARD_BYTES) -> Packed:
    """A poisoned packed buffer; `lead_bytes` other than GUARD_BYTES misalign it."""
    size = num_ids * pool.page_bytes
    whole = torch.from_numpy(position_pattern(lead_bytes + size + GUARD_BYTES))
    return Packed(whole, whole[lead_bytes : lead_bytes + size].view(num_ids, pool.page_bytes))


def expected_packed(pool: PagedPool, ids: tuple[int, ...]) -> Tensor:
    """uint8[len(ids), page_bytes]: what a gather of a whole pool has to give."""
    packed = torch.empty((len(ids), pool.page_bytes), dtype=torch.uint8)
    gather_naive(pool, torch.tensor(ids, dtype=torch.int64), packed)
    return packed


def poisoned_sums(num_ids: int) -> Tensor:
    return torch.full((num_ids,), _SUM_POISON, dtype=torch.int64)


def expected_sums(pages: Tensor) -> Tensor:
    """int64[n]: the checksums of uint8[n, page_bytes] by numpy."""
    return torch.from_numpy(page_checksums(pages.numpy()))
