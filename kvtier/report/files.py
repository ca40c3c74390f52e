"""The folder of a replay's results: checked before the runs, never a mix of two replays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO

from kvtier.errors import ConfigError
from kvtier.files import irregular, write_atomically

RESULTS = "results.json"
PLOTS = tuple(
    f"{name}.{kind}" for name in ("overview", "places", "window") for kind in ("png", "svg")
)


def check_folder(folder: Path) -> None:
    """Check that results can be written to `folder`, and leave everything as it was.

    Raises ConfigError when a file is in the way of the folder, something that is no file in the
    way of a result, or writing is not allowed.
    """
    made: list[Path] = []
    try:
        for place in reversed([folder, *folder.parents]):
            if not place.exists():
                place.mkdir()
                made.append(place)
        with NamedTemporaryFile(dir=folder, prefix=".kvtier-"):
            pass
        faults = {name: irregular(folder / name) for name in (RESULTS, *PLOTS)}
    except OSError as error:
        raise ConfigError(_explain(folder, error)) from error
    finally:
        for place in reversed(made):
            place.rmdir()
    for name, fault in faults.items():
        if fault is not None:
            raise ConfigError(f"--out {folder}: {fault} named {name} is in the way; move it away")


def write_results(folder: Path, encoded: bytes) -> Path:
    """Put `encoded` in place as results.json; what an earlier replay left there goes with it.

    Makes the folder when it is missing. Returns the path. Raises OSError that names the file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RESULTS

    def write(file: IO[bytes]) -> None:
        file.write(encoded)
        file.flush()
        for old in _old_plots(folder):
            old.unlink()

    write_atomically(path, write)
    return path


def _old_plots(folder: Path) -> Iterator[Path]:
    for name in PLOTS:
        path = folder / name
        if path.is_file() or path.is_symlink():
            yield path


def _explain(folder: Path, error: OSError) -> str:
    if folder.exists() and not folder.is_dir():
        return f"--out {folder} is a file; name a folder"
    for place in folder.parents:
        if place.exists() and not place.is_dir():
            return f"--out {folder} cannot be written: {place} is a file; name another folder"
    return f"--out {folder} cannot be written ({error.strerror}); name another folder"
