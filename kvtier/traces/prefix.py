"""Prefix-chained block ids of Mooncake rows: an id stands for its block and all before it."""

from kvtier.traces.values import as_list, as_tokens

# Mooncake FAST'25 traces: one id per 512 tokens, the last block may be partial
BLOCK_TOKENS = 512


def block_ids(value: object) -> tuple[int, ...]:
    """The ids of a `hash_ids` field; empty when it is missing or holds anything but ids."""
    ids = [as_tokens(item) for item in as_list(value)]
    known = tuple(item for item in ids if item is not None)
    return known if len(known) == len(ids) else ()


def common_prefix_tokens(before: tuple[int, ...], ids: tuple[int, ...], input_tokens: int) -> int:
    """Tokens of a prompt of `input_tokens` that lie in the leading blocks both lists share."""
    shared = 0
    for mine, theirs in zip(ids, before, strict=False):
        if mine != theirs:
            break
        shared += 1
    return min(shared * BLOCK_TOKENS, input_tokens)
