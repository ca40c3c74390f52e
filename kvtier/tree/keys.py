"""Keys of the tree: token ids in a namespace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.errors import TreeError

Tokens = npt.NDArray[np.int32]
Pages = npt.NDArray[np.int32]
ChildKey = int | bytes

_MAX_TOKEN = 2**31 - 1


class Namespace(NamedTuple):
    """Prompts of two namespaces never share a page: each part is a kind of its own.

    `weights` is the version of the model's weights, `adapter` a LoRA, `tenant` a salt.
    """

    model: str = ""
    weights: str = ""
    adapter: str = ""
    tenant: str = ""


def as_tokens(tokens: Sequence[int] | npt.NDArray[np.integer]) -> Tokens:
    """int32[n], the given array itself where it is one already.

    Raises TreeError for more than one dimension, for other than integers, and for ids outside
    [0, 2^31).
    """
    try:
        given = np.asarray(tokens)
    except (TypeError, ValueError) as error:
        raise TreeError(f"tokens are no list of integers: {error}") from None
    if given.size == 0 and given.ndim == 1:
        return np.empty(0, np.int32)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise TreeError(f"tokens are {given.dtype}{given.shape}; pass integers in one dimension")
    # One pass: a bit above the 30th, the sign included, is in the union if it is in any.
    if not 0 <= int(np.bitwise_or.reduce(given)) <= _MAX_TOKEN:
        raise TreeError(f"token ids {given.min()} to {given.max()} go beyond [0, {_MAX_TOKEN}]")
    return given.astype(np.int32, copy=False)


def as_pages(pages: Sequence[int] | npt.NDArray[np.integer]) -> Pages:
    """int32[n] of page ids; raises TreeError as `as_tokens` does."""
    try:
        return as_tokens(pages)
    except TreeError as error:
        raise TreeError(
            str(error).replace("token id", "page id").replace("tokens", "pages")
        ) from None


def child_key(tokens: Tokens, at: int, page_size: int) -> ChildKey:
    """What tells the children of a node apart: the page that begins at `at`."""
    return int(tokens[at]) if page_size == 1 else tokens[at : at + page_size].tobytes()


def distinct(pages: Pages) -> Pages:
    """The pages; raises TreeError where one is named twice."""
    if pages.size > 1:
        ordered = np.sort(pages)
        if (ordered[1:] == ordered[:-1]).any():
            raise TreeError("a page is named twice; each has one content")
    return pages


def common_length(tokens: Tokens, at: int, other: Tokens, page_size: int) -> int:
    """How many of `other` equal tokens[at:], in whole pages."""
    length = min(tokens.size - at, other.size)
    differs = tokens[at : at + length] != other[:length]
    first = int(differs.argmax()) if length else 0
    same = first if length and differs[first] else length
    return same - same % page_size
