"""Runs the shell blocks that a Markdown file marks as `bash run`.

    python tests/readme/run_blocks.py README.md docs/*.md

Each block runs in the current folder and stops at its first failing command; the first block that
fails ends the run with its exit code. A file without such a block is fine, no block at all is not.
"""

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

_BLOCK = re.compile(r"^```bash run\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> Iterator[str]:
    """The marked blocks of a Markdown text, in order."""
    for match in _BLOCK.finditer(text):
        yield match.group(1)


def main(paths: Sequence[str]) -> int:
    """Run every marked block of the files; returns an exit code."""
    num_run = 0
    for path in paths:
        for block in blocks(Path(path).read_text(encoding="utf-8")):
            print(f"--- {path}\n{block}", end="", flush=True)
            code = subprocess.run(["bash", "-euo", "pipefail", "-c", block], check=False).returncode
            if code:
                print(f"{path}: exit code {code}", file=sys.stderr)
                return code
            num_run += 1
    print(f"{num_run} blocks ran")
    return 0 if num_run else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
