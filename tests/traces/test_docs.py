"""docs/traces.md names what the code counts and draws."""

import re
from pathlib import Path

import pytest

from kvtier.traces import PROFILES
from kvtier.traces.claude_code import COUNTED

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def page() -> str:
    return (ROOT / "docs" / "traces.md").read_text()


def test_every_warning_name_is_documented_and_every_documented_one_exists(page):
    code = "".join(file.read_text() for file in (ROOT / "kvtier" / "traces").glob("*.py"))
    counted = set(re.findall(r'warnings\["(\w+)"\]', code)) | set(COUNTED.values())
    counted |= {"bad_delay", "bad_reason"}
    table = page.split("## Repairs and skips")[1].split("## Synthetic")[0]
    first_cells = "".join(re.findall(r"^\|([^|]*)\|", table, re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", first_cells)) == counted


def test_every_native_field_and_profile_is_documented(page):
    reader = (ROOT / "kvtier" / "traces" / "native.py").read_text()
    fields = set(re.findall(r'(?:\.get\(|\(record, )"(\w+)"', reader))
    assert {"timestamp", "delay", "shared_tokens"} < fields
    for name in fields | set(PROFILES):
        assert f"`{name}`" in page
