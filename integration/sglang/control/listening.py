"""The listening socket of a control server."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.integration.sglang.control.address import Address

_BACKLOG = 128
_PROBE_S = 1.0  # for a server on the same machine to take a connection


class Listener:
    """A socket that listens from the start, so that nobody else can take the address.

    `address` is what was bound, with the real port. A Unix socket has mode 0600; a file that a
    dead server left is replaced. Raises ConfigError, in one line, where that is not possible.
    """

    def __init__(self, address: Address) -> None:
        self._file: tuple[int, int] | None = None
        try:
            self.socket = self._open_unix(address) if address.path else _open_tcp(address)
        except OSError as error:
            raise ConfigError(
                f"cannot open the control channel on {address}: {error.strerror or error}"
            ) from error
        self.address = address
        if not address.path:
            self.address = Address(host=address.host, port=self.socket.getsockname()[1])

    def close(self) -> None:
        """Stop listening and remove the socket's file, unless another server has replaced it."""
        self.socket.close()
        path, self_made = Path(self.address.path), self._file
        self._file = None
        if self_made is None:
            return
        try:
            if _identity(path) == self_made:
                path.unlink()
        except FileNotFoundError:
            pass

    def _open_unix(self, address: Address) -> socket.socket:
        path = Path(address.path)
        with _locked(path.parent):
            _remove_stale(path, address)
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.bind(address.path)
                path.chmod(0o600)  # nobody connects before `listen`
                sock.listen(_BACKLOG)
                self._file = _identity(path)
            except OSError:
                sock.close()
                raise
        return sock


def _open_tcp(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A restart must not wait for connections in TIME_WAIT; a live listener still refuses.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address.host, address.port))
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Alone among servers that open a socket in `folder`: none removes another's fresh file."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _remove_stale(path: Path, address: Address) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"cannot open the control channel on {address}: the file is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(address.path)
        except ConnectionRefusedError:
            path.unlink()
            return
        except (TimeoutError, BlockingIOError):
            pass  # its queue is full: alive
    raise ConfigError(f"cannot open the control channel on {address}: a server is listening there")


def _identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino
