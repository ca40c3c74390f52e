"""perf.cpu_copy proves its bytes before it times anything."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'kvtier[runtime]'")

from torch import Tensor

from kvtier.errors import ConfigError, SimulationError
from kvtier.kernels.cpu import CpuCopy
from kvtier.kernels.ids import PageIds
from kvtier.kernels.pool import PagedPool
from perf import cpu_copy

PAYLOAD_BYTES = 1 << 20


class SwappingCopy(CpuCopy):
    """Copies to and from the right pages in the wrong order."""

    def gather(
        self, pool: PagedPool, page_ids: PageIds, packed: Tensor, *, checksums: Tensor | None = None
    ) -> None:
        super().gather(pool, page_ids[::-1], packed, checksums=checksums)

    def scatter(
        self, pool: PagedPool, page_ids: PageIds, packed: Tensor, *, checksums: Tensor | None = None
    ) -> None:
        super().scatter(pool, page_ids[::-1], packed, checksums=checksums)


def test_each_case_is_one_record_with_its_share_and_verdict() -> None:
    records = list(cpu_copy.measure((2048,), PAYLOAD_BYTES, num_rounds=2))
    assert {(r["case"], r["ids"], r["threads"]) for r in records} == {
        (case, ids, threads)
        for case in ("cpu_gather", "cpu_scatter")
        for ids in ("scattered", "sorted")
        for threads in (1, 2)
    }
    assert all(r["n"] == 2 and not r["simulated"] for r in records)
    assert all(r["met"] is (r["share_of_memcpy"] >= r["target_share"]) for r in records)


@pytest.mark.parametrize("direction", ["gather", "scatter"])
def test_wrong_bytes_stop_the_benchmark(direction: str) -> None:
    memory, packed = cpu_copy.huge(8 * PAYLOAD_BYTES), cpu_copy.huge(PAYLOAD_BYTES)
    memory[:] = np.random.default_rng(0).integers(0, 256, memory.size, dtype=np.uint8)
    with SwappingCopy(1) as backend:
        bench = cpu_copy.view(memory, packed, 2048, {1: backend})
        for order in ("scattered", "sorted"):
            with pytest.raises(SimulationError, match="wrong bytes"):
                cpu_copy.check_bytes(bench, cpu_copy.Case(2048, direction, order, 1))


def test_a_payload_of_broken_pages_is_refused() -> None:
    with pytest.raises(ConfigError, match="pass a multiple of"):
        list(cpu_copy.measure((2048,), PAYLOAD_BYTES + 1, num_rounds=1))
