"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO

_FAULTS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def irregular(path: Path) -> str | None:
    """What stands at `path`, links followed, where that is neither nothing nor a regular file.

    "a folder", "a FIFO", ... Nothing is opened. Raises OSError when the path cannot be looked at,
    such as below a file.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return None
    return _FAULTS.get(stat.S_IFMT(mode))


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Call `write` with a temporary file beside `path`, then rename it to `path`.

    Whatever ends `write` early, an interrupt too, leaves `path` as it was and no temporary file.
    Raises OSError that names `path` when it cannot be written.
    """
    try:
        with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            try:
                write(file)
                file.flush()
                os.chmod(file.name, 0o666 & ~_umask())
                os.replace(file.name, path)
            except BaseException:
                # The first error is the one to tell of.
                with suppress(OSError):
                    os.unlink(file.name)
                raise
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
