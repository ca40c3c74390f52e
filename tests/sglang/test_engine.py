"""kvtier inside a real server: outputs, both eviction orders, commands, clients, aborts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from msgspec.structs import replace

from kvtier.ids import Label
from kvtier.integration.sglang.control.protocol import (
    AnyCommand,
    Commands,
    Demote,
    Pin,
    Promote,
    Release,
    Residency,
    Result,
    SetLabel,
    Status,
    Unpin,
)

from .channel import kill, request_bytes, stall
from .engine import (
    CONTEXT,
    CUSTOM,
    DRAM,
    HBM,
    HINTS,
    KEY,
    PAGE,
    SYSTEM,
    Engine,
    Place,
    check_sum,
    in_parallel,
    running_engine,
    tokens,
    until,
)
from .streams import (
    PHASES,
    Ending,
    Phase,
    Stream,
    decode,
    end_at_random,
    killed_in_the_middle,
    stream_in,
)

pytestmark = [pytest.mark.timeout(240), pytest.mark.server]

BUSY, IDLE, INACTIVE = Label.BUSY, Label.IDLE, Label.INACTIVE


@pytest.fixture(scope="module")
def running(tiny_model: Path, server_logs: Path) -> Iterator[Engine]:
    with running_engine(tiny_model, server_logs) as engine:
        yield engine


@pytest.fixture
def engine(running: Engine) -> Engine:
    running.clear()
    return running


def test_a_stock_server_beside_an_installed_kvtier_has_its_own_cache_on_the_rust_core(
    engine: Engine,
) -> None:
    log = engine.stock.log.path.read_text(encoding="utf-8")
    assert "source=default impl=UnifiedRadixCache" in log
    assert "RustUnifiedTreeCore" in log


def test_twelve_agents_in_room_for_four_answer_as_a_stock_server_with_room_for_all(
    engine: Engine,
) -> None:
    names = [f"agent {index}" for index in range(12)]

    answers = in_parallel([partial(engine.converse, name, turns=4) for name in names])
    expected = in_parallel([partial(engine.converse_with_stock, name, turns=4) for name in names])
    for name, mine, stock in zip(names, answers, expected, strict=True):
        assert [a.output_ids for a in mine] == [a.output_ids for a in stock], name
    hits = [answer.cached for agent in answers for answer in agent]
    assert any(hit.get("device", 0) > SYSTEM for hit in hits)
    assert any(hit.get("host", 0) > 0 for hit in hits)
    engine.settle()


def test_an_idle_program_leaves_hbm_before_a_busy_one_though_it_was_used_later(
    engine: Engine,
) -> None:
    engine.bring("order busy", BUSY)
    engine.bring("order idle", IDLE)
    check_who_stays(engine, stays="order busy", leaves="order idle")


def test_relabelling_by_the_channel_alone_flips_who_leaves_hbm(engine: Engine) -> None:
    engine.bring("flip first", BUSY)
    engine.bring("flip second", IDLE)
    engine.obey(SetLabel("flip first", 1, IDLE), SetLabel("flip second", 1, BUSY))
    check_who_stays(engine, stays="flip second", leaves="flip first")


def check_who_stays(engine: Engine, *, stays: str, leaves: str) -> None:
    """Under pressure for the context of one of two programs, which share HBM with busy ones."""
    engine.bring(f"{stays}, filler", size=HBM - 2 * CONTEXT)
    engine.bring(f"{stays}, more", size=CONTEXT - PAGE)  # and a page for its answer
    assert engine.place(stays) == Place(CONTEXT, CONTEXT)
    assert engine.place(leaves) == Place(0, CONTEXT)
    for program, hit in ((stays, {"device": CONTEXT, "host": 0}), (leaves, {"host": CONTEXT})):
        prompt = [*tokens(program, CONTEXT), 1]
        answer = engine.ask(program, prompt)
        assert answer.cached == {"device": 0, "host": 0} | hit
        assert answer.output_ids == engine.reference(prompt)


def test_dram_loses_inactive_pages_then_duplicates_then_busy_and_last_idle_sole_copies(
    engine: Engine,
) -> None:
    order = ("dram inactive", "dram twin", "dram busy", "dram idle")
    # The least recently used is to leave last.
    for program, label in zip(reversed(order), (IDLE, BUSY, BUSY, IDLE), strict=True):
        engine.bring(program, label)
    engine.obey(SetLabel("dram inactive", 0, INACTIVE))
    for program in ("dram inactive", "dram busy", "dram idle"):
        engine.demote(program)
    rest = (DRAM - 4 * CONTEXT) // 2
    for index in range(2):
        engine.bring(f"dram busy filler {index}", BUSY, size=rest)
        engine.demote(f"dram busy filler {index}")
    assert engine.settle().dram.free == 0

    def fill_and_see() -> Iterator[list[int]]:
        for index in range(1 + 3 + 2 * rest // CONTEXT):
            engine.bring(f"dram idle filler {index}", IDLE)
            engine.demote(f"dram idle filler {index}")
            yield [engine.place(program).dram for program in order]

    seen = list(fill_and_see())
    left = [4 - min(index + 1, 3) for index in range(len(seen) - 1)]
    assert seen[:-1] == [[0] * (4 - n) + [CONTEXT] * n for n in left]
    assert seen[-1][:3] == [0, 0, 0]
    assert seen[-1][3] < CONTEXT
    assert [engine.place(f"dram busy filler {index}").dram for index in range(2)] == [0, 0]
    assert engine.place("dram twin").hbm == CONTEXT


def test_demoted_pages_come_back_by_promotion_and_answers_stay_the_same(engine: Engine) -> None:
    engine.bring("moves")
    (demoted,) = engine.control.send(Demote("moves", 0))
    assert (demoted.status, demoted.tokens) == (Status.STARTED, CONTEXT)
    until(lambda: engine.place("moves") == Place(0, CONTEXT), "it is in DRAM alone")
    assert engine.settle().hbm.free == HBM
    (promoted,) = engine.control.send(Promote("moves", 1))
    assert (promoted.status, promoted.tokens) == (Status.STARTED, CONTEXT)
    until(lambda: engine.place("moves") == Place(CONTEXT, CONTEXT), "it is in HBM again")
    prompt = [*tokens("moves", CONTEXT), 1]
    answer = engine.ask("moves", prompt, 8)
    assert answer.cached == {"device": CONTEXT, "host": 0}
    assert answer.output_ids == engine.reference(prompt, 8)


def test_a_pinned_program_stays_in_hbm_under_pressure_until_it_is_unpinned(engine: Engine) -> None:
    engine.bring("pinned", IDLE)
    engine.obey(Pin("pinned", 0))
    assert engine.residency("pinned").pinned
    assert engine.control.levels().hbm.protected == CONTEXT
    (refused,) = engine.control.send(Demote("pinned", 0))
    assert refused == Result(Status.REFUSED, "the program is pinned; unpin it first")
    engine.bring("pressure", size=HBM - CONTEXT - 2 * PAGE)
    assert engine.place("pinned") == Place(CONTEXT, CONTEXT)
    engine.obey(Unpin("pinned", 0))
    assert not engine.residency("pinned").pinned
    engine.bring("more pressure", size=CONTEXT)
    assert engine.place("pinned").hbm == 0


def test_a_released_program_leaves_hbm_before_idle_ones_and_is_still_served_right(
    engine: Engine,
) -> None:
    engine.bring("stays idle", IDLE)
    engine.bring("released", BUSY)
    engine.obey(Release("released", 1))
    assert engine.place("released") == Place(0, 0)
    assert engine.residency("released").label is INACTIVE
    engine.bring("release filler", size=HBM - 2 * CONTEXT)
    engine.bring("release more", size=CONTEXT - PAGE)
    assert engine.place("stays idle").hbm == CONTEXT
    prompt = [*tokens("released", CONTEXT), 1]
    answer = engine.ask("released", prompt)
    assert answer.cached == {"device": 0, "host": CONTEXT}
    assert answer.output_ids == engine.reference(prompt)


def test_residency_tells_of_one_program_of_all_and_of_no_unknown_one(engine: Engine) -> None:
    shared = tokens("common", 64)
    for program, label in (("res a", BUSY), ("res b", IDLE)):
        engine.ask(program, [*shared, *tokens(program, 128)], label=label, epoch=7)
    of_all = {residency.program: residency for residency in engine.control.residency()}
    assert engine.control.residency("res nobody") == []
    assert "res nobody" not in of_all
    group = of_all["res a"].shared_group
    for program, label in (("res a", BUSY), ("res b", IDLE)):
        expected = Residency(program, 7, label, 128, 128, group, 64, pinned=False, running=0)
        assert of_all[program] == engine.residency(program) == expected
    assert group


@pytest.mark.parametrize(
    ("path", "fields", "headers", "labelled"),
    [
        ("/v1/completions", CUSTOM, {}, True),
        ("/v1/completions", {}, KEY, False),
        ("/v1/completions", {"session_id": "named"}, {}, False),
        ("/generate", {"sampling_params": CUSTOM}, {}, True),
        ("/generate", HINTS, {}, True),
        ("/generate", {"routing_key": "named"}, {}, False),
        ("/generate", {"session_id": "named"}, {}, False),
    ],
)
def test_a_request_names_its_program_in_every_way_that_is_documented(
    engine: Engine, path: str, fields: dict[str, Any], headers: dict[str, str], labelled: bool
) -> None:
    engine.control.send(SetLabel("named", 4, INACTIVE), Release("named", 4))  # as if unknown
    text = "The agent reads the failing test. " * 4
    body = {"text": text} if path == "/generate" else {"model": "m", "prompt": text}
    engine.server.http.post(path, json=body | fields, headers=headers).raise_for_status()
    named = engine.residency("named")
    assert named.hbm_private > 0
    assert named.label is (IDLE if labelled else BUSY)


@pytest.mark.parametrize(
    ("malformed", "field"),
    [
        ("run-17", "`object`"),
        ({"label": "busy"}, "`program`"),
        ({"program": 17}, "`$.program`"),
        ({"program": "x", "label": "warm"}, "`$.label`"),
        ({"program": "x", "epoch": -1}, "`$.epoch`"),
        ({"program": "x", "lable": "busy"}, "`lable`"),
    ],
)
def test_malformed_labels_are_logged_by_field_and_the_request_is_served(
    engine: Engine, malformed: object, field: str
) -> None:
    prompt = tokens("malformed", 3 * PAGE)
    rid = f"malformed {field}"
    answer = engine.server.generate(prompt, 4, custom_params={"kvtier": malformed}, rid=rid)
    assert answer.output_ids == engine.reference(prompt, 4)
    log = engine.server.log.path.read_text(encoding="utf-8")
    said = f"request {rid}: kvtier ignores its custom_params.kvtier: "
    lines = [line for line in log.splitlines() if said in line]
    assert [field in line for line in lines] == [True]
    assert engine.control.residency("x") == []


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1])
@pytest.mark.parametrize("label", Label)
def test_prompts_around_one_page_are_served_and_hold_whole_pages_only(
    engine: Engine, length: int, label: Label
) -> None:
    program = f"short {length} {label}"
    prompt = tokens(program, length)
    expected = engine.reference(prompt)
    for _ in range(2):
        assert engine.ask(program, prompt, label=label, epoch=1).output_ids == expected
    whole = length // PAGE * PAGE
    assert engine.residency(program) == Residency(program, 1, label, whole, whole, "", 0, False, 0)
    assert engine.settle().hbm.evictable == whole


def test_a_request_without_a_prompt_is_refused_and_leaves_nothing(engine: Engine) -> None:
    with pytest.raises(httpx.HTTPStatusError, match="400"):
        engine.ask("short 0", [], label=BUSY)
    assert engine.control.residency("short 0") == []
    assert engine.settle().hbm.free == HBM


@pytest.mark.parametrize("command", [SetLabel, Demote, Promote, Pin, Unpin, Release])
def test_a_command_with_an_old_epoch_is_refused_and_names_both(
    engine: Engine, command: Callable[..., AnyCommand]
) -> None:
    program = f"stale {command}"
    engine.bring(program, BUSY, size=PAGE, epoch=9)
    before = engine.residency(program)
    (result,) = engine.control.send(command(program, 8, *([IDLE] if command is SetLabel else [])))
    assert result == Result(Status.REFUSED, "epoch 8 is stale, 9 was seen")
    assert engine.residency(program) == before


def test_a_request_with_an_old_epoch_is_served_and_relabels_nothing(engine: Engine) -> None:
    engine.obey(SetLabel("old request", 9, IDLE))
    prompt = tokens("old request", PAGE)
    answer = engine.ask("old request", prompt, label=BUSY, epoch=8)
    assert answer.output_ids == engine.reference(prompt)
    residency = engine.residency("old request")
    assert (residency.label, residency.epoch) == (IDLE, 9)
    engine.ask("old request", prompt, label=BUSY, epoch=9)
    assert engine.residency("old request").label is BUSY


def test_control_clients_that_die_or_stall_change_nothing_for_requests(engine: Engine) -> None:
    engine.bring("client", size=512)
    before = engine.residency("client")
    prompt = [*tokens("client", 512), 1]
    expected = engine.reference(prompt, 64)
    demote = request_bytes(msgspec.json.encode(Commands([Demote("client", 0)])))
    address = engine.control.address
    with ExitStack() as stack:
        for sock in stall(address, *[demote[:cut] for cut in (0, 1, 40, -40, -1)]):
            stack.enter_context(sock)
        killed_in_the_middle(address, demote[:-1])
        answer = engine.ask("client", prompt, 64)
        check_sum(engine.control.levels())
    assert answer.output_ids == expected
    assert answer.cached == {"device": 512, "host": 0}
    after = engine.residency("client")
    assert (after.label, after.epoch, after.pinned) == (before.label, before.epoch, False)
    assert after.hbm_private == after.dram_private == (512 + 64) // PAGE * PAGE
    kill(stall(address, demote)[0])  # whole: it may happen, and nobody reads the answer
    assert engine.ask("client", prompt, 64).output_ids == expected
    engine.settle()


def test_levels_add_up_at_any_time_while_programs_run_and_move(engine: Engine) -> None:
    names = [f"load {index}" for index in range(6)]
    with ThreadPoolExecutor() as pool:
        lives = [pool.submit(engine.run_and_move, name) for name in names]
        protected = 0
        while not all(life.done() for life in lives):
            levels = engine.control.levels()
            check_sum(levels)
            protected = max(protected, levels.hbm.protected)
        for life in lives:
            life.result()
    assert protected > 0
    assert engine.settle().dram.free < DRAM
    for name in names:
        prompt = tokens(name, CONTEXT)
        assert engine.ask(name, prompt, 4).output_ids == engine.reference(prompt, 4)


@pytest.mark.parametrize("end", [Stream.abort, Stream.hang_up])
@pytest.mark.parametrize("phase", PHASES)
def test_a_request_ended_early_leaves_its_program_and_the_pools_as_before(
    engine: Engine, phase: Phase, end: Callable[[Stream], Ending | None]
) -> None:
    program = f"{phase.__name__} {end.__name__}"
    engine.bring(program, IDLE)
    before = engine.residency(program)
    with stream_in(phase, engine, program) as stream:
        ending = end(stream)
    engine.settle()
    assert engine.residency(program) == before
    if ending is not None:
        assert ending.reason == "abort"
        assert (ending.count > 0) is (phase is decode)


def test_requests_ended_at_random_moments_leave_room_labels_and_answers_as_before(
    engine: Engine,
) -> None:
    names = [f"random {index}" for index in range(8)]
    for index, name in enumerate(names):
        engine.bring(name, (BUSY, IDLE)[index % 2], size=CONTEXT // 2, epoch=3)
        if index % 4 < 2:
            engine.demote(name, epoch=3)
    before = [engine.residency(name) for name in names]

    def are_back() -> bool:
        after = [engine.residency(name) for name in names]
        # A load that was made stays, and others' pages may have taken their place in HBM.
        moved = [
            replace(old, hbm_private=new.hbm_private)
            for old, new in zip(before, after, strict=True)
        ]
        return after == moved

    endings = in_parallel([partial(end_at_random, engine, name, rounds=6) for name in names])
    assert {ending.reason for of_one in endings for ending in of_one} == {"abort"}
    until(are_back, "all is as before")
    engine.settle()
    for name in names:
        prompt = [*tokens(name, CONTEXT // 2), 1]
        assert engine.ask(name, prompt, 4).output_ids == engine.reference(prompt, 4)
    engine.bring("random, all of HBM", size=HBM - 2 * PAGE)
    engine.settle()
