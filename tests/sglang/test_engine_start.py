"""What starts and what does not: SGLang that nobody asked kvtier into, and refused starts."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.registry import TreeCacheBuildContext
from sglang.srt.server_args import ServerArgs

from kvtier.errors import ConfigError
from kvtier.integration.sglang.factory import build_cache

from ..sglang_cpu.server import ServerStartError, SglangServer
from ..sglang_cpu.shim import SITE
from .channel import TOKEN
from .engine import KVTIER_ARGUMENTS, PAGE

STATES = """
import json, os
from sglang.srt.arg_groups import choices
from sglang.srt.mem_cache import registry, utils
from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler
from sglang.srt.mem_cache.unified_cache import tree_core_registry
from sglang.srt.mem_cache.unified_cache.components import FullComponent
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.plugins import GENERAL_PLUGINS_GROUP, load_plugins, load_plugins_by_group
from sglang.srt.plugins.hook_registry import HookRegistry

def state():
    classes = (registry.create_unified_radix_cache, UnifiedRadixCache, FullComponent)
    return {
        "environment": dict(os.environ),
        "backends": registry.registered_radix_cache_backends(),
        "policies": {name: repr(made) for name, made in utils._EVICTION_POLICY_FACTORIES.items()},
        "policy names": list(choices.RADIX_EVICTION_POLICY_CHOICES),
        "host pools": repr(hybrid_pool_assembler._STRATEGIES),
        "tree cores": repr(tree_core_registry._TREE_CORE_REGISTRY),
        "classes": {repr(made): {k: repr(v) for k, v in vars(made).items()} for made in classes},
        "hooks": repr(dict(HookRegistry._hooks)),
    }

states = [state()]
load_plugins()
states.append(state())
os.environ["KVTIER_SGLANG"] = "1"
activate, _ = load_plugins_by_group(GENERAL_PLUGINS_GROUP)["kvtier"]
activate()
states.append(state())
print(json.dumps(states))
"""


def test_sglang_with_kvtier_installed_but_not_asked_for_is_unchanged(tmp_path: Path) -> None:
    foreign = ("KVTIER_", "PYTHON", "SGLANG_", "COV_CORE_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", STATES],
        cwd=tmp_path,
        env=clean | {"PYTHONPATH": str(SITE)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=100,
        check=True,
    )
    stock, loaded, asked = json.loads(done.stdout.splitlines()[-1])
    assert loaded == stock
    assert set(asked["backends"]) - set(stock["backends"]) == {"kvtier"}


CONTROL = {"KVTIER_CONTROL": "127.0.0.1:0"}
TOKEN_ONLY = {"KVTIER_CONTROL_TOKEN": TOKEN}


@pytest.fixture(scope="module")
def context() -> TreeCacheBuildContext:
    """What SGLang hands to the factory, but for the objects that a refused start never touches."""
    args = ServerArgs(model_path="dummy", device="cpu", page_size=PAGE)
    nothing: Any = None
    return TreeCacheBuildContext(
        server_args=args,
        params=CacheInitParams(False, nothing, nothing, PAGE),
        is_hybrid_swa=False,
        is_hybrid_ssm=False,
        enable_hierarchical_cache=True,
        disable_radix_cache=False,
        tp_worker=nothing,
        model_config=nothing,
        tp_size=1,
        tp_rank=0,
        tp_group=nothing,
    )


@pytest.mark.parametrize(
    ("environment", "changes", "params", "names"),
    [
        (CONTROL, {}, {}, "KVTIER_CONTROL_TOKEN"),
        (TOKEN_ONLY, {}, {}, "KVTIER_CONTROL"),
        (CONTROL | {"KVTIER_CONTROL_TOKEN": "short"}, {}, {}, "16"),
        ({"KVTIER_CONTROL": "0.0.0.0:1"} | TOKEN_ONLY, {}, {}, "0.0.0.0"),
        ({}, {"enable_hierarchical_cache": False}, {}, "--enable-hierarchical-cache"),
        ({}, {"disable_radix_cache": True}, {}, "--disable-radix-cache"),
        ({}, {"tp_size": 2}, {}, "tensor"),
        ({}, {"is_hybrid_swa": True}, {}, "sliding windows"),
        ({}, {}, {"eviction_policy": "slru"}, "--radix-eviction-policy"),
        ({}, {}, {"is_eagle": True}, "speculative"),
        ({}, {}, {"enable_session_radix_cache": True}, "session"),
    ],
)
def test_what_does_not_work_together_is_refused_in_one_line_before_anything_is_built(
    context: TreeCacheBuildContext,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    changes: dict[str, Any],
    params: dict[str, Any],
    names: str,
) -> None:
    for name in ("KVTIER_CONTROL", "KVTIER_CONTROL_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    wrong = replace(context, params=replace(context.params, **params), **changes)
    with pytest.raises(ConfigError) as refused:
        build_cache(wrong)
    assert names in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.timeout(180)
@pytest.mark.server
def test_a_server_whose_control_address_is_taken_ends_by_itself_and_says_so(
    tiny_model: Path, server_logs: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        server = SglangServer(
            tiny_model,
            server_logs,
            arguments=KVTIER_ARGUMENTS,
            environment={"KVTIER_CONTROL": address, "KVTIER_CONTROL_TOKEN": TOKEN},
        )
        with pytest.raises(ServerStartError, match="SGLang ended with status"), server:
            pytest.fail("a server without its control channel is ready")
    said = f"cannot open the control channel on {address}: "
    log = server.log.path.read_text(encoding="utf-8")
    assert [line for line in log.splitlines() if said in line]
