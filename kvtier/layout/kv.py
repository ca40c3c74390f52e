"""`KVLayout`: the segments of one rank's KV pool and the byte counts that follow from them."""

from dataclasses import dataclass
from enum import StrEnum

from kvtier.errors import ConfigError


class KVDtype(StrEnum):
    """Element type of the KV pool."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"

    @property
    def num_bytes(self) -> int:
        """Bytes of one element."""
        return 1 if self is KVDtype.FP8 else 2


@dataclass(frozen=True, slots=True)
class Segment:
    """One tensor of a pool, for instance the keys of one layer."""

    name: str
    layer: int
    row_bytes: int
    """Bytes of one token in this tensor, on one rank."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The segments that one rank of a tensor-parallel group of `tp` ranks holds.

    Raises ConfigError when there is no segment, or a size is below one.
    """

    segments: tuple[Segment, ...]
    dtype: KVDtype
    page_size: int
    """Tokens per page."""
    tp: int = 1

    def __post_init__(self) -> None:
        if not self.segments:
            raise ConfigError("a KV layout needs at least one segment; the model has no layers")
        empty = [s.name for s in self.segments if s.row_bytes < 1]
        if empty:
            raise ConfigError(f"segment {empty[0]!r} has rows of no bytes; check the model's shape")
        _at_least_one("page_size", self.page_size)
        _at_least_one("tp", self.tp)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all segments, on one rank."""
        return sum(segment.row_bytes for segment in self.segments)

    @property
    def bytes_per_token_all_ranks(self) -> int:
        """Bytes of one token over all ranks; replicated parts count once per rank."""
        return self.bytes_per_token * self.tp

    def page_bytes(self, page_size: int | None = None) -> int:
        """Bytes of one page on one rank; `page_size` in tokens, the layout's own if not given."""
        return self.bytes_per_token * self._tokens(page_size)

    def fragment_bytes(self, page_size: int | None = None) -> int:
        """Bytes of the smallest fragment of a page in a layer-first pool, on one rank.

        A fragment is the contiguous run of one page in one segment. `page_size` in tokens, the
        layout's own if not given.
        """
        return min(segment.row_bytes for segment in self.segments) * self._tokens(page_size)

    def _tokens(self, page_size: int | None) -> int:
        return self.page_size if page_size is None else _at_least_one("page_size", page_size)


def _at_least_one(name: str, value: int) -> int:
    if value < 1:
        raise ConfigError(f"{name}={value} must be at least 1")
    return value
