"""The factory that SGLang calls: what it builds, and what it refuses in one line."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore

from kvtier.errors import ConfigError
from kvtier.integration.sglang import guard
from kvtier.integration.sglang.cache import LabelledRadixCache
from kvtier.integration.sglang.control.address import Address
from kvtier.integration.sglang.control.client import ControlClient
from kvtier.integration.sglang.control.protocol import Levels
from kvtier.integration.sglang.eviction import LabelledFullComponent
from kvtier.integration.sglang.factory import build_cache
from kvtier.integration.sglang.host_pool import PagedHostPool
from kvtier.integration.sglang.settings import CONTROL, TOKEN

from .caches import RECLAIM, build_context

SECRET = "0123456789abcdef"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the factory sets is undone at the end."""
    monkeypatch.setenv(RECLAIM, "0")
    monkeypatch.delenv(CONTROL, raising=False)
    monkeypatch.delenv(TOKEN, raising=False)


@pytest.fixture
def budget() -> Iterator[AbstractContextManager[None]]:
    with host_memory_budget_scope(1 << 30) as scope:
        yield scope


def refusal(context: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        build_cache(context)
    line = str(raised.value)
    assert "\n" not in line
    assert os.environ[RECLAIM] == "0"  # nothing was changed
    return line


CONTEXTS: dict[str, tuple[dict[str, Any], str]] = {
    "no radix cache": ({"disable_radix_cache": True}, "drop --disable-radix-cache"),
    "no host tier": ({"enable_hierarchical_cache": False}, "add --enable-hierarchical-cache"),
    "sliding windows": ({"is_hybrid_swa": True}, "full attention only"),
    "Mamba": ({"is_hybrid_ssm": True}, "full attention only"),
    "DSA": ({"is_dsa": True}, "full attention only"),
    "tensor parallel": ({"tp_size": 2}, "runs on one rank yet"),
    "speculation": ({"params": {"is_eagle": True}}, "speculative decoding"),
    "pipeline": ({"params": {"pp_size": 2}}, "runs on one rank yet"),
    "policy": ({"params": {"eviction_policy": "lfu"}}, "drop --radix-eviction-policy"),
    "sessions": ({"params": {"enable_session_radix_cache": True}}, "drop the session flags"),
}
ARGUMENTS: dict[str, tuple[str, Any, str]] = {
    "data parallel": ("dp_size", 2, "runs on one rank yet"),
    "streaming sessions": ("enable_streaming_session", True, "drop the session flags"),
    "third tier": ("hicache_storage_backend", "file", "drop --hicache-storage-backend"),
    "in passing": ("hicache_host_memory_mode", "buffer_only", "drop --hicache-host-memory-mode"),
    "prefill": ("disaggregation_mode", "prefill", "disaggregated prefill and decode"),
    "decode": ("disaggregation_mode", "decode", "disaggregated prefill and decode"),
}


@pytest.mark.parametrize("case", CONTEXTS)
def test_a_model_or_flag_that_does_not_work_is_refused_in_one_line(case: str) -> None:
    changed, message = CONTEXTS[case]
    line = refusal(build_context(**changed))
    assert line.startswith("--radix-cache-backend kvtier ")
    assert message in line


@pytest.mark.parametrize("case", ARGUMENTS)
def test_an_argument_of_the_server_that_does_not_work_is_refused_in_one_line(case: str) -> None:
    name, value, message = ARGUMENTS[case]
    line = refusal(build_context(flags={name: value}))
    assert line.startswith("--radix-cache-backend kvtier ")
    assert message in line


def owners_of(name: str) -> tuple[list[Any], str]:
    """All that have the attribute themselves, base classes included, and the attribute's name."""
    module, _, path = name.partition(":")
    *way, last = path.split(".")
    found: Any = import_module(module)
    for attribute in way:
        found = getattr(found, attribute)
    candidates = [found, *(found if isinstance(found, type) else type(found)).__mro__]
    return [one for one in dict.fromkeys(candidates) if last in getattr(one, "__dict__", {})], last


@pytest.mark.parametrize("name", guard.PRIVATE_NAMES)
def test_a_private_name_that_is_gone_is_told_in_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = build_context()
    owners, attribute = owners_of(name)
    for owner in owners:
        monkeypatch.delattr(owner, attribute)
    assert refusal(context) == (
        f"this SGLang lacks {name}, which kvtier needs; install an unchanged SGLang 0.5.23"
    )


@pytest.mark.parametrize(
    "variables", [{CONTROL: "127.0.0.1:0"}, {TOKEN: SECRET}], ids=["no token", "no address"]
)
def test_half_a_control_channel_is_refused_before_anything_is_built(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    line = refusal(build_context())
    assert CONTROL in line
    assert TOKEN in line


@pytest.mark.parametrize(
    ("address", "token", "message"),
    [
        ("127.0.0.1:0", "short", "16"),
        ("0.0.0.0:0", SECRET, "loopback"),
        ("nonsense", SECRET, "control address 'nonsense'"),
    ],
)
def test_a_control_channel_that_cannot_be_is_refused_in_one_line(
    address: str, token: str, message: str, monkeypatch: pytest.MonkeyPatch, budget: Any
) -> None:
    monkeypatch.setenv(CONTROL, address)
    monkeypatch.setenv(TOKEN, token)
    with pytest.raises(ConfigError) as raised:
        build_cache(build_context())
    assert "\n" not in str(raised.value)
    assert message in str(raised.value)


@pytest.mark.parametrize("asked_for", [None, "rust", "python"])
def test_the_cache_is_kvtiers_on_the_python_core_whatever_core_is_asked_for(
    asked_for: str | None, monkeypatch: pytest.MonkeyPatch, budget: Any
) -> None:
    if asked_for is not None:
        monkeypatch.setenv("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", asked_for)
    cache = build_cache(build_context())
    assert type(cache) is LabelledRadixCache
    assert type(cache.tree_core) is UnifiedTreeCore
    assert [type(one) for one in cache.components.values()] == [LabelledFullComponent]
    assert type(cache.cache_controller.mem_pool_host.anchor_entry.host_pool) is PagedHostPool
    assert cache.control is None
    cache.release_host_resources()


def test_the_log_says_which_core_runs(caplog: pytest.LogCaptureFixture, budget: Any) -> None:
    with caplog.at_level("INFO"):
        build_cache(build_context()).release_host_resources()
    assert "Tree Core: UnifiedTreeCore" in caplog.text


def test_sglang_leaves_duplicates_in_dram_to_kvtiers_order(budget: Any) -> None:
    cache = build_cache(build_context())
    from sglang.srt.environ import envs

    assert envs.SGLANG_HICACHE_SKIP_HOST_DUPLICATE_RECLAIM.get() is True
    cache.release_host_resources()


def ask(address: Address, cache: LabelledRadixCache) -> Levels:
    """The answer to a client while the scheduler goes on stepping."""
    with ThreadPoolExecutor(1) as thread, ControlClient(address, SECRET) as client:
        answer = thread.submit(client.levels)
        while not answer.done():
            cache.check_hicache_events()
            wait([answer], timeout=0.01)
        return answer.result()


@pytest.mark.parametrize("address", ["127.0.0.1:0", "unix:{folder}/s"])
def test_the_control_channel_answers_until_the_cache_gives_its_memory_back(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: Any
) -> None:
    monkeypatch.setenv(CONTROL, address.format(folder=tmp_path))
    monkeypatch.setenv(TOKEN, SECRET)
    cache = build_cache(build_context(pages=32))
    where = cache.control.address
    levels = ask(where, cache)
    assert (levels.hbm.capacity, levels.hbm.free, levels.dram.capacity) == (32, 32, 64)
    cache.release_host_resources()
    family = socket.AF_UNIX if where.path else socket.AF_INET
    with socket.socket(family) as other, pytest.raises(OSError, match=r"refused|No such file"):
        other.connect(where.path or (where.host, where.port))
