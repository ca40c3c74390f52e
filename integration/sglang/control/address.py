"""Where a control channel is, and the token that opens it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Self

from kvtier.errors import ConfigError

MIN_TOKEN_CHARS = 16

_MAX_PATH_BYTES = 107  # sun_path of Linux, without its final zero
_HOST_PORT = re.compile(r"(?:\[(?P<six>[^\[\]]+)\]|(?P<four>[^:\[\]]+)):(?P<port>[0-9]{1,5})")
_TOKEN = re.compile(r"[!-~]+")


@dataclass(frozen=True, slots=True)
class Address:
    """A loopback host and port, or the path of a Unix socket; the other is empty."""

    host: str = ""
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Address of "127.0.0.1:31000", "[::1]:31000", "localhost:0" or "unix:/path.sock".

        Port 0 is any free one. Raises ConfigError for all else, hosts beyond loopback included.
        """
        if text.startswith("unix:"):
            return cls(path=_socket_path(text.removeprefix("unix:"), text))
        match = _HOST_PORT.fullmatch(text)
        if match is None:
            raise ConfigError(
                f"control address {text!r} is none of 127.0.0.1:PORT, [::1]:PORT, unix:/PATH"
            )
        port = int(match["port"])
        if port > 65535:
            raise ConfigError(f"control address {text!r}: the port is above 65535")
        return cls(host=_loopback(match["six"] or match["four"], text), port=port)

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def check_token(token: str) -> str:
    """`token` itself; ConfigError (which never shows it) unless it is fit for an HTTP header."""
    if len(token) < MIN_TOKEN_CHARS:
        raise ConfigError(
            f"the control token has {len(token)} characters, it needs {MIN_TOKEN_CHARS} or more"
        )
    if not _TOKEN.fullmatch(token):
        raise ConfigError("the control token may hold printable ASCII only, without blanks")
    return token


def _socket_path(path: str, text: str) -> str:
    if not path.startswith("/") or "\0" in path:
        raise ConfigError(f"control address {text!r}: a Unix socket needs an absolute path")
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise ConfigError(
            f"control address {text!r}: the path is longer than {_MAX_PATH_BYTES} bytes"
        )
    return path


def _loopback(host: str, text: str) -> str:
    # A name server has no say in what is bound.
    if host == "localhost":
        return "127.0.0.1"
    try:
        loopback = ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise ConfigError(
            f"control address {text!r}: only loopback (127.0.0.1, [::1], localhost) is served; "
            "put a proxy with TLS in front to reach it from elsewhere"
        )
    return host
