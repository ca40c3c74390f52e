"""The runner of documented commands."""

import subprocess
import sys
from pathlib import Path

import pytest

RUNNER = Path(__file__).with_name("run_blocks.py")


def run(tmp_path: Path, text: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "page.md").write_text(text)
    return subprocess.run(
        [sys.executable, str(RUNNER), "page.md"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )


def test_marked_blocks_run_and_others_do_not(tmp_path: Path) -> None:
    result = run(tmp_path, "```bash run\ntouch yes\n```\n\n```bash\ntouch no\n```\n")
    assert result.returncode == 0
    assert (tmp_path / "yes").exists()
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("block", ["false\ntrue\n", "false | cat\n", "echo $UNSET_NAME\n"])
def test_a_block_with_a_failing_command_fails(tmp_path: Path, block: str) -> None:
    result = run(tmp_path, f"```bash run\n{block}```\n")
    assert result.returncode != 0
    assert "page.md: exit code" in result.stderr


def test_pages_without_a_marked_block_fail(tmp_path: Path) -> None:
    assert run(tmp_path, "nothing\n").returncode == 1
