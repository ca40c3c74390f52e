"""perf.cpu_copy proves its bytes before it times anything."""

from __future__ import annotations

import json
from pathlib import Path

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


@pytest.mark.parametrize(
    ("payload_bytes", "num_rounds", "message"),
    [
        (PAYLOAD_BYTES + 1, 1, "pass a multiple of"),
        (0, 1, "a payload of 0 MiB; pass a multiple of"),
        (PAYLOAD_BYTES, 0, "0 rounds; pass 1 or more"),
        (1 << 60, 1, r"takes .* MiB of memory, .* are free"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    payload_bytes: int, num_rounds: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        list(cpu_copy.measure((2048,), payload_bytes, num_rounds))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--payload-mib", "0"], "a payload of 0 MiB; pass a multiple of 32 MiB"),
        (["--payload-mib", "-1"], "a payload of -1 MiB; pass a multiple of 32 MiB"),
        (["--payload-mib", "16"], "a payload of 16 MiB; pass a multiple of 32 MiB"),
        (["--quick", "--payload-mib", "100000000000000"], "are free; pass a smaller one"),
        (["--rounds", "0"], "0 rounds; pass 1 or more"),
        (["--rounds", "-1"], "-1 rounds; pass 1 or more"),
        (["--json", "/proc/none/file"], "--json /proc/none/file: cannot be written"),
        (["--json", "/"], "--json /: cannot be written: Is a directory"),
    ],
)
def test_wrong_flags_end_in_one_line_before_anything_is_measured(
    flags: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["cpu_copy", *flags])
    with pytest.raises(SystemExit) as caught:
        cpu_copy.main()
    said = capsys.readouterr()
    assert (caught.value.code, said.out) == (2, "")
    assert message in said.err.splitlines()[-1]


def test_words_that_fill_memory_are_all_different() -> None:
    memory = np.zeros(8 * (3 << 20), dtype=np.uint8)
    cpu_copy.fill(memory, np.uint64(7))
    words = memory.view(np.uint64)
    assert np.unique(words).size == words.size
    assert words[0] == 7


def test_results_are_appended_to_the_named_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new" / "results.jsonl"
    flags = ["--quick", "--payload-mib", "1", "--rounds", "1", "--json", str(file)]
    monkeypatch.setattr("sys.argv", ["cpu_copy", *flags])
    for runs in (1, 2):
        cpu_copy.main()
        records = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(records) == 16 * runs
        assert {record["n"] for record in records} == {1}
    assert capsys.readouterr().out
