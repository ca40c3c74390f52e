"""Reader of Mooncake rows: requests without sessions, chained into programs by their prefixes."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.traces.model import START_DIGITS, GapKind, ProgramTrace, Step, Trace, build_trace
from kvtier.traces.prefix import BLOCK_TOKENS, block_ids, common_prefix_tokens
from kvtier.traces.records import Record, iter_records
from kvtier.traces.values import as_stamp_s, as_tokens

FORMAT = "mooncake"


@dataclass(frozen=True)
class _Request:
    at_s: float
    input_tokens: int
    output_tokens: int
    ids: tuple[int, ...]

    @property
    def num_full_blocks(self) -> int:
        return min(self.input_tokens // BLOCK_TOKENS, len(self.ids))


@dataclass
class _Chain:
    requests: list[_Request] = field(default_factory=list)


def read_mooncake(path: Path) -> Trace:
    """Read Mooncake rows and group them into programs.

    A request is the next step of a program when its ids extend all full blocks of the program's
    last request, the last of those blocks came into the trace with that program (a block met
    before is a head that many share and tells nothing), and it arrives later. The time of a
    model call is not recorded: `reason_s` is None and `gap_s` is the time between two arrivals,
    model time included. Raises TraceError when no row can be used.
    """
    warnings: Counter[str] = Counter()
    requests = _requests(path, warnings)
    chains = _chain(requests)
    heads = Counter(i for chain in chains for i in set(chain.requests[0].ids))
    origin_s = requests[0].at_s if requests else 0.0
    programs = [_program(i, chain, heads, origin_s) for i, chain in enumerate(chains)]
    return build_trace(FORMAT, programs, warnings, path.name)


def _requests(path: Path, warnings: Counter[str]) -> list[_Request]:
    requests: list[_Request] = []
    for record in iter_records(path, warnings):
        request = _request(record)
        if request is None:
            warnings["bad_row"] += 1
            continue
        if requests and request.at_s < requests[-1].at_s:
            warnings["time_back"] += 1
        requests.append(request)
    # a stable sort: rows of one tick keep their order in the file
    return sorted(requests, key=lambda request: request.at_s)


def _request(record: Record) -> _Request | None:
    at_s = as_stamp_s(record.get("timestamp"))
    input_tokens = as_tokens(record.get("input_length"))
    output_tokens = as_tokens(record.get("output_length"))
    if at_s is None or not input_tokens or output_tokens is None:
        return None
    return _Request(
        at_s=round(at_s, START_DIGITS),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        ids=block_ids(record.get("hash_ids")),
    )


def _chain(requests: list[_Request]) -> list[_Chain]:
    chains: list[_Chain] = []
    owner: dict[int, _Chain] = {}  # block -> the chain that brought it into the trace
    open_at: dict[int, _Chain] = {}  # last full block of a chain's last request -> chain
    for request in requests:
        chain = _predecessor(request, open_at)
        if chain is None:
            chain = _Chain()
            chains.append(chain)
        chain.requests.append(request)
        for block in request.ids:
            owner.setdefault(block, chain)
        if request.num_full_blocks:
            tail = request.ids[request.num_full_blocks - 1]
            if owner[tail] is chain:
                open_at[tail] = chain
    return chains


def _predecessor(request: _Request, open_at: dict[int, _Chain]) -> _Chain | None:
    """The chain with the longest last prompt that `request` extends; it is taken out of the map."""
    for block in reversed(request.ids):
        chain = open_at.get(block)
        if chain is not None and chain.requests[-1].at_s < request.at_s:
            return open_at.pop(block)
    return None


def _program(index: int, chain: _Chain, heads: Counter[int], origin_s: float) -> ProgramTrace:
    first = chain.requests[0]
    group, shared_tokens = _shared_head(first, heads)
    steps = []
    for number, request in enumerate(chain.requests):
        is_last = number == len(chain.requests) - 1
        after = None if is_last else chain.requests[number + 1]
        before = chain.requests[number - 1].ids if number else ()
        steps.append(
            Step(
                context_tokens=request.input_tokens,
                output_tokens=request.output_tokens,
                reused_tokens=common_prefix_tokens(before, request.ids, request.input_tokens),
                gap_s=round(after.at_s - request.at_s, START_DIGITS) if after else 0.0,
                gap_kind=GapKind.PROMPT if after else GapKind.END,
            )
        )
    start_s = round(first.at_s - origin_s, START_DIGITS)
    return ProgramTrace(f"mooncake-{index:06d}", tuple(steps), start_s, None, group, shared_tokens)


def _shared_head(first: _Request, heads: Counter[int]) -> tuple[str | None, int]:
    """The group of programs whose first prompts begin alike: the last leading block they share.

    Ids are prefix-chained, so programs of one group have identical heads; two that share less
    than that are in different groups, which counts too little sharing and never too much.
    """
    num_shared = 0
    while num_shared < len(first.ids) and heads[first.ids[num_shared]] > 1:
        num_shared += 1
    if not num_shared:
        return None, 0
    tokens = min(num_shared * BLOCK_TOKENS, first.input_tokens)
    return f"head-{first.ids[num_shared - 1]}", tokens
