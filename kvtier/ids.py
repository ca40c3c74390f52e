"""What crosses module borders by name: labels, directions."""

from enum import StrEnum


class Label(StrEnum):
    """Eviction class of a program's pages (MORI section 4.3.2); follows its queue, never iota.

    BUSY: in its worker's GPU queue. IDLE: in its CPU queue. INACTIVE: waiting, released or unknown.
    """

    BUSY = "busy"
    IDLE = "idle"
    INACTIVE = "inactive"


class Direction(StrEnum):
    """Which way a copy goes between the two tiers of one worker."""

    D2H = "d2h"
    H2D = "h2d"
