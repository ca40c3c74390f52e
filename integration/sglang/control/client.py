"""A client of the control channel, for tools and tests; it blocks."""

from __future__ import annotations

from types import TracebackType
from typing import Self, TypeVar

import httpx
import msgspec

from kvtier.integration.sglang.control.address import Address, check_token
from kvtier.integration.sglang.control.errors import ControlError
from kvtier.integration.sglang.control.protocol import (
    AnyCommand,
    Commands,
    Levels,
    Residencies,
    Residency,
    Result,
    Results,
)

T = TypeVar("T")


class _Refusal(msgspec.Struct):
    error: str


class ControlClient:
    """Talks to one worker, from any thread; a context manager.

    Every method raises ControlError with the worker's line and HTTP status, or without a status
    where no answer came within `timeout_s` (more than the server's own 10 s).
    """

    def __init__(self, address: Address, token: str, timeout_s: float = 15.0) -> None:
        self.address = address
        # A connection for each request: none is reused in the moment in which the server ends it,
        # so a request that failed to connect has surely not happened.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.Client(
            base_url="http://localhost" if address.path else f"http://{address}",
            transport=httpx.HTTPTransport(uds=address.path or None, limits=limits, trust_env=False),
            headers={"Authorization": f"Bearer {check_token(token)}"},
            timeout=timeout_s,
            trust_env=False,  # a proxy of the environment is not for loopback
        )

    def send(self, *commands: AnyCommand) -> list[Result]:
        """Results of the commands, carried out in order; a REFUSED one does not stop the rest."""
        if not commands:
            return []
        body = msgspec.json.encode(Commands(list(commands)))
        answer = self._ask("POST", "/v1/commands", Results, content=body)
        if len(answer.results) != len(commands):
            raise ControlError(
                f"{self.address}: {len(answer.results)} results for {len(commands)} commands", 200
            )
        return answer.results

    def residency(self, program: str | None = None) -> list[Residency]:
        """Where the pages of one program, or of all, are; [] for an unknown one."""
        params = {} if program is None else {"program": program}
        return self._ask("GET", "/v1/residency", Residencies, params=params).programs

    def levels(self) -> Levels:
        """How full both pools are."""
        return self._ask("GET", "/v1/levels", Levels)

    def close(self) -> None:
        """Close the client; it cannot be used again."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _ask(
        self,
        method: str,
        path: str,
        answer: type[T],
        *,
        content: bytes | None = None,
        params: dict[str, str] | None = None,
    ) -> T:
        try:
            response = self._http.request(method, path, content=content, params=params)
        except httpx.ConnectError as error:
            raise ControlError(f"cannot reach a worker at {self.address}: {error}") from error
        except httpx.HTTPError as error:
            raise ControlError(
                f"no answer from {self.address} ({type(error).__name__}); "
                "whether the request happened is unknown"
            ) from error
        if response.status_code != 200:
            raise ControlError(_line(response), response.status_code)
        try:
            return msgspec.json.decode(response.content, type=answer)
        except msgspec.MsgspecError as error:
            raise ControlError(f"{self.address} answered something else: {error}", 200) from error


def _line(response: httpx.Response) -> str:
    try:
        return msgspec.json.decode(response.content, type=_Refusal).error
    except msgspec.MsgspecError:  # not from the worker, or not HTTP as it understands it
        return f"HTTP {response.status_code} {response.reason_phrase}"
