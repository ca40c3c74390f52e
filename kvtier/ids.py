"""What crosses module borders by name: labels."""

from enum import StrEnum


class Label(StrEnum):
    """Eviction class of a program's pages (MORI section 4.3.2); follows its queue, never iota.

    BUSY: in its worker's GPU queue. IDLE: in its CPU queue. INACTIVE: waiting, released or unknown.
    """

    BUSY = "busy"
    IDLE = "idle"
    INACTIVE = "inactive"
