"""Stock SGLang on this machine's CPU: the ground that tests of the plug-in stand on."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.platforms import current_platform

from ..sglang_cpu import logs
from ..sglang_cpu.server import SglangServer
from ..sglang_cpu.tiny_model import VOCABULARY

PROMPT = [(7 * index + index // 5) % (VOCABULARY - 1) + 1 for index in range(500)]
OTHER_START = [*reversed(PROMPT[:16]), *PROMPT[16:]]
SMALL = ("--max-total-tokens", "4096", "--max-running-requests", "8")


def holders(log: Path) -> set[int]:
    """Ids of all living processes on this machine that have the file open, as output or else."""
    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if str(log) in {file.path for file in process.open_files()}:
                found.add(process.pid)
    return found


def shared_memory(server: SglangServer) -> set[Path]:
    maps = (area.path for process in server.processes() for area in process.memory_maps())
    return {path for path in map(Path, maps) if path.is_relative_to("/dev/shm") and path.exists()}


def check_cache(server: SglangServer) -> None:
    first = server.generate(PROMPT)
    again = server.generate(PROMPT)
    assert (first.prompt_tokens, first.cached_tokens) == (500, 0)
    assert (again.cached_tokens, again.cached) == (499, {"device": 499, "host": 0})
    assert len(first.output_ids) == 16
    assert again.output_ids == first.output_ids
    assert server.generate(OTHER_START).output_ids != first.output_ids
    server.flush()
    assert server.generate(PROMPT).cached_tokens == 0


def check_stream_and_abort(server: SglangServer) -> None:
    whole = server.generate("The agent reads", 8)
    pieces = list(server.stream("The agent reads", 8))
    assert len(pieces) > 1
    assert (pieces[-1].output_ids, pieces[-1].finish_reason) == (whole.output_ids, "length")
    long = server.stream(PROMPT, 3000, rid="long")
    assert next(long).finish_reason is None
    server.abort("long")
    *_, last = long
    assert last.finish_reason == "abort"
    assert 0 < len(last.output_ids) < 3000
    with pytest.raises(httpx.HTTPStatusError, match="400"):
        server.generate(PROMPT, sampling={"temperature": -1.0})


def test_sglang_is_imported_in_process_and_runs_on_the_cpu() -> None:
    assert UnifiedRadixCache.__module__ == "sglang.srt.mem_cache.unified_radix_cache"
    assert current_platform.device_type == "cpu"
    assert current_platform.is_out_of_tree()


@pytest.mark.timeout(180)
@pytest.mark.server
def test_a_stock_server_reuses_its_cache_and_leaves_nothing_behind(
    tiny_model: Path, server_logs: Path
) -> None:
    server = SglangServer(tiny_model, server_logs, arguments=SMALL)
    with server:
        assert server.log in logs.running
        assert server.server_info()["max_total_num_tokens"] == 4096
        check_cache(server)
        check_stream_and_abort(server)
        running = holders(server.log.path)
        assert {process.pid for process in server.processes()} == running
        assert len(running) >= 3  # main, scheduler, detokenizer
        shared = shared_memory(server)
        assert shared
    assert holders(server.log.path) == set()
    assert server.log not in logs.running
    assert not [path for path in shared if path.exists()]
