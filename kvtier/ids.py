"""Types of the identifiers that cross module borders."""

from typing import NewType

ProgramId = NewType("ProgramId", str)
"""One agent session; a sub-agent is a program of its own."""

RequestId = NewType("RequestId", str)
"""One model call of a program."""

WorkerId = NewType("WorkerId", str)
"""One engine with its own HBM and DRAM."""

GroupId = NewType("GroupId", str)
"""Programs whose prompts begin with the same tokens."""
