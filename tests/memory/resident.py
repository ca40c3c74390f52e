"""What the kernel says of this process's memory."""

import re
from pathlib import Path

MIB = 1 << 20


def resident_bytes() -> int:
    """Counted page by page, unlike the figure in statm."""
    text = Path("/proc/self/smaps_rollup").read_text()
    found = re.search(r"^Rss:\s+(\d+) kB$", text, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def flags_at(address: int) -> set[str]:
    """The kernel's flags of the mapping that has `address`."""
    text = Path("/proc/self/smaps").read_text()
    inside = False
    for line in text.splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    raise AssertionError(f"nothing is mapped at {address:#x}")
