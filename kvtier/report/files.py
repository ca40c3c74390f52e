"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO

from kvtier.errors import ConfigError


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Call `write` with a temporary file beside `path`, then rename it to `path`.

    Whatever ends `write` early, an interrupt too, leaves `path` as it was and no temporary file.
    Raises OSError when the folder cannot be written.
    """
    with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            write(file)
            file.flush()
            os.chmod(file.name, 0o666 & ~_umask())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def prepare_folder(folder: Path) -> None:
    """Make `folder` and check that a file can be written there. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=folder, prefix=".kvtier-"):
            pass
    except FileExistsError as error:
        raise ConfigError(f"--out {folder} is a file; name a folder") from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"--out {folder} cannot be written ({reason}); name another") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
