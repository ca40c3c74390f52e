"""A real SGLang server on this machine's CPU."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil

from . import logs
from .ports import ReservedPort
from .processes import ProcessGroup
from .shim import SITE

START_S = 120.0
STOP_S = 15.0
REQUEST_S = 60.0
_POLL_S = 0.2
# Or the pools would take most of the machine's memory.
_SMALL = ("--max-total-tokens", "32768", "--max-running-requests", "32")

Prompt = str | Sequence[int]


class ServerStartError(RuntimeError):
    """The server ended or did not get ready in time. The text ends with the log's last lines."""


@dataclass(frozen=True)
class Generation:
    """An answer of /generate; while it streams, what is there so far.

    `cached` counts prompt tokens that were not computed, by place (`device`, `host`, `storage`).
    """

    text: str
    output_ids: tuple[int, ...]
    finish_reason: str | None
    prompt_tokens: int
    cached_tokens: int
    cached: Mapping[str, int]
    meta: Mapping[str, Any]

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Generation:
        meta = answer["meta_info"]
        details = meta.get("cached_tokens_details") or {}
        return cls(
            text=answer["text"],
            output_ids=tuple(answer["output_ids"]),
            finish_reason=(meta["finish_reason"] or {}).get("type"),
            prompt_tokens=meta["prompt_tokens"],
            cached_tokens=meta["cached_tokens"],
            cached={place: n for place, n in details.items() if isinstance(n, int)},
            meta=meta,
        )


class SglangServer:
    """`python -m sglang.launch_server --device cpu` in a process group of its own.

    As a context manager it is ready in its block and gone after it; several may be started before
    the first is waited for. `arguments` go to the command line, where the last of a kind counts,
    `environment` on top of a clean one. `folder` gets the log; `python` must have SGLang installed.
    The server ends with the thread that starts it; the other methods may be called from several
    threads. HTTP errors raise httpx.HTTPStatusError with the server's answer as a note.
    """

    def __init__(
        self,
        model: Path,
        folder: Path,
        *,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        python: str = sys.executable,
        start_s: float = START_S,
        stop_s: float = STOP_S,
    ) -> None:
        self._ports = (ReservedPort(), ReservedPort())
        http, nccl = (port.number for port in self._ports)
        self._command = (
            *("-m", "sglang.launch_server", "--model-path", str(model), "--device", "cpu"),
            *("--dtype", "float32", "--host", "127.0.0.1", "--port", str(http)),
            *("--nccl-port", str(nccl), *_SMALL, *arguments),
        )
        self._python = python
        self._extra_environment = environment or {}
        self._start_s = start_s
        self._stop_s = stop_s
        self._scratch: Path | None = None
        self._group: ProcessGroup | None = None
        self.url = f"http://127.0.0.1:{http}"
        self.http = httpx.Client(base_url=self.url, timeout=REQUEST_S, trust_env=False)
        self.log = logs.ServerLog(folder / f"sglang-{http}.log")

    def __enter__(self) -> SglangServer:
        if self._group is None:
            self.start()
        self.wait_until_ready()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception):
            error.add_note(self.log.tail())
        self.stop()

    def start(self) -> None:
        """Start the process, once, and return at once."""
        assert self._group is None, "a server starts once"
        self._scratch = Path(tempfile.mkdtemp(prefix="sglang-"))
        self._group = ProcessGroup(
            self._python,
            self._command,
            folder=self._scratch,
            environment=_environment(self._scratch, self._extra_environment),
            log=self.log.path,
        )
        logs.running.append(self.log)

    def wait_until_ready(self) -> None:
        """Raises ServerStartError, and stops the server, if it ends or needs over `start_s`."""
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop(grace_s=0)
            raise

    @property
    def pid(self) -> int:
        """Of the main process, and of its process group."""
        return self._started.pid

    def processes(self) -> set[psutil.Process]:
        """Main process, scheduler, detokenizer and helpers that are alive."""
        return self._started.members()

    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int = 16,
        *,
        custom_params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        rid: str | None = None,
        sampling: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> Generation:
        """Greedy continuation of exactly `max_new_tokens` tokens, unless `sampling` says otherwise.

        `prompt` is text or token ids; `fields` are further fields of the request's body.
        """
        body = _body(prompt, max_new_tokens, custom_params, rid, sampling, fields)
        response = self.http.post("/generate", json=body, headers=headers)
        return Generation.of(_checked(response).json())

    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int = 16,
        *,
        custom_params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        rid: str | None = None,
        sampling: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> Iterator[Generation]:
        """As `generate`, one Generation per piece. Closing the iterator hangs up on the server."""
        body = _body(prompt, max_new_tokens, custom_params, rid, sampling, fields)
        body["stream"] = True
        with self.http.stream("POST", "/generate", json=body, headers=headers) as response:
            if response.is_error:
                response.read()
            for line in _checked(response).iter_lines():
                data = line.removeprefix("data:").strip()
                if data and data != "[DONE]":
                    yield Generation.of(json.loads(data))

    def abort(self, rid: str) -> None:
        """Abort the request `rid`, wherever it is; an unknown one is no error."""
        _checked(self.http.post("/abort_request", json={"rid": rid}))

    def flush(self) -> None:
        """Empty the cache. The server refuses while requests run."""
        _checked(self.http.post("/flush_cache"))

    def server_info(self) -> dict[str, Any]:
        """Arguments and state of the server, as /server_info tells them."""
        info = _checked(self.http.get("/server_info")).json()
        assert isinstance(info, dict)
        return info

    def stop(self, grace_s: float | None = None) -> None:
        """End all processes: asked first, killed after `grace_s` seconds (0: at once).

        An idle server needs about five seconds when asked. Again is harmless.
        """
        self.http.close()
        try:
            if self._group is not None:
                self._group.stop(self._stop_s if grace_s is None else grace_s)
        finally:
            if self.log in logs.running:
                logs.running.remove(self.log)
            for port in self._ports:
                port.close()
            if self._scratch is not None:
                shutil.rmtree(self._scratch, ignore_errors=True)

    @property
    def _started(self) -> ProcessGroup:
        assert self._group is not None, "the server was not started"
        return self._group

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self._start_s
        while not self._is_ready():
            status = self._started.wait(_POLL_S)
            if status is not None:
                raise ServerStartError(f"SGLang ended with status {status}; {self.log.tail()}")
            if time.monotonic() > deadline:
                raise ServerStartError(f"not ready in {self._start_s:g} s; {self.log.tail()}")

    def _is_ready(self) -> bool:
        with suppress(httpx.TransportError):
            return self.http.get("/health").is_success
        return False


def _environment(scratch: Path, extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without settings of Python, SGLang and kvtier, then `extra`."""
    foreign = ("KVTIER_", "PYTHON", "PYTEST_", "SGLANG_", "COV_CORE_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return {
        **clean,
        "PYTHONPATH": str(SITE),
        # SGLang leaves the files of its sockets behind.
        "TMPDIR": str(scratch),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        # /health then tells ready from starting at once, without generating a token.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        **extra,
    }


def _body(
    prompt: Prompt,
    max_new_tokens: int,
    custom_params: Mapping[str, Any] | None,
    rid: str | None,
    sampling: Mapping[str, Any] | None,
    fields: Mapping[str, Any],
) -> dict[str, Any]:
    settings = {
        "temperature": 0.0,
        "max_new_tokens": max_new_tokens,
        "ignore_eos": True,
        "custom_params": custom_params,
        **(sampling or {}),
    }
    asked = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
    body = {**asked, "sampling_params": settings, "rid": rid, **fields}
    return {name: value for name, value in body.items() if value is not None}


def _checked(response: httpx.Response) -> httpx.Response:
    try:
        return response.raise_for_status()
    except httpx.HTTPStatusError as error:
        error.add_note(response.text)
        raise
