"""Whose request it is: what SGLang carries, in which order it counts, and what is malformed."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.ids import Label
from kvtier.integration.sglang.identity import Identity, identity_of

LOGGER = "kvtier.integration.sglang.identity"


@dataclass
class SamplingParams:
    custom_params: Any = None


@dataclass
class Action:
    """An action of SGLang's `kv_hints`."""

    action_type: str
    payload: dict[str, Any]


@dataclass
class Hints:
    actions: list[Action]


@dataclass
class Request:
    """The attributes of SGLang's `Req` that name a program."""

    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    kv_hints: Hints | None = None
    routing_key: Any = None
    session_id: Any = None
    rid: str = "request-7"


def custom(value: Any, **others: Any) -> Request:
    return Request(SamplingParams({"kvtier": value}), **others)


def hinted(*payloads: dict[str, Any], **others: Any) -> Request:
    return Request(kv_hints=Hints([Action("kvtier", payload) for payload in payloads]), **others)


@pytest.mark.parametrize("make", [custom, hinted])
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"program": "p"}, Identity("p")),
        ({"program": "p", "label": None, "epoch": None}, Identity("p")),
        ({"program": "p", "label": "busy"}, Identity("p", Label.BUSY)),
        ({"program": "p", "label": "idle", "epoch": 0}, Identity("p", Label.IDLE, 0)),
        ({"program": "p", "label": "inactive"}, Identity("p", Label.INACTIVE)),
        ({"program": "p", "epoch": 2**63 - 1}, Identity("p", None, 2**63 - 1)),
        ({"program": "é" * 256}, Identity("é" * 256)),
    ],
)
def test_custom_params_and_hints_carry_program_label_and_epoch(
    make: Any, value: dict[str, Any], expected: Identity
) -> None:
    assert identity_of(make(value)) == expected


@pytest.mark.parametrize("carrier", ["routing_key", "session_id"])
@pytest.mark.parametrize("name", ["p", "x" * 256])
def test_routing_key_and_session_name_a_program(carrier: str, name: str) -> None:
    assert identity_of(Request(**{carrier: name})) == Identity(name)


EVERY: dict[str, Any] = {
    "sampling_params": SamplingParams({"kvtier": {"program": "custom"}, "other": 1}),
    "kv_hints": Hints([Action("other", {}), Action("kvtier", {"program": "hint"})]),
    "routing_key": "key",
    "session_id": "session",
}


@pytest.mark.parametrize(
    ("left_out", "program"), [(0, "custom"), (1, "hint"), (2, "key"), (3, "session")]
)
def test_the_first_carrier_counts(left_out: int, program: str) -> None:
    there = dict(list(EVERY.items())[left_out:])
    assert identity_of(Request(**there)) == Identity(program)


@pytest.mark.parametrize(
    "empty",
    [
        {},
        {"sampling_params": SamplingParams({})},
        {"sampling_params": SamplingParams({"thinking_budget": 5})},
        {"kv_hints": Hints([])},
        {"kv_hints": Hints([Action("other", {"program": "p"})])},
        {"routing_key": ""},
    ],
)
@pytest.mark.parametrize("session", [None, "", "s"])
def test_a_carrier_without_a_program_leaves_the_word_to_the_next_one(
    empty: dict[str, Any], session: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    expected = Identity("s") if session else None
    assert identity_of(Request(session_id=session, **empty)) == expected
    assert not caplog.records


def test_attributes_that_a_request_lacks_name_nobody() -> None:
    @dataclass
    class Bare:
        sampling_params: object
        rid: str = "r"

    assert identity_of(Bare(object())) is None


def test_the_first_action_of_several_counts() -> None:
    assert identity_of(hinted({"program": "one"}, {"program": "two"})) == Identity("one")


def warning_about(request: Request, caplog: pytest.LogCaptureFixture) -> str:
    """The one line in the log about a request that names nobody."""
    caplog.clear()
    with caplog.at_level(logging.DEBUG):
        assert identity_of(request) is None
    (record,) = caplog.records
    assert (record.name, record.levelname) == (LOGGER, "WARNING")
    assert record.exc_info is None
    line = record.getMessage()
    assert line.splitlines() == [line]
    assert request.rid in line
    return line


@pytest.mark.parametrize("make", [custom, hinted])
@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({}, "program"),
        ({"label": "idle"}, "program"),
        ({"program": ""}, "program"),
        ({"program": "x" * 257}, "program"),
        ({"program": None}, "program"),
        ({"program": 7}, "program"),
        ({"program": b"p"}, "program"),
        ({"program": ["p"]}, "program"),
        ({"program": "p", "label": "hot"}, "label"),
        ({"program": "p", "label": "BUSY"}, "label"),
        ({"program": "p", "label": ""}, "label"),
        ({"program": "p", "label": 2}, "label"),
        ({"program": "p", "label": {}}, "label"),
        ({"program": "p", "label": "idle\nINFO all is well"}, "label"),
        ({"program": "p", "epoch": -1}, "epoch"),
        ({"program": "p", "epoch": 2**63}, "epoch"),
        ({"program": "p", "epoch": 10**30}, "epoch"),
        ({"program": "p", "epoch": 1.5}, "epoch"),
        ({"program": "p", "epoch": float("nan")}, "epoch"),
        ({"program": "p", "epoch": "3"}, "epoch"),
        ({"program": "p", "epoch": True}, "epoch"),
        ({"program": "p", "epoch": []}, "epoch"),
        ({"program": "p", "eopch": 3}, "eopch"),
    ],
)
def test_a_malformed_value_names_nobody_and_one_line_in_the_log_names_the_field(
    make: Any, value: dict[str, Any], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert named in warning_about(make(value, routing_key="k", session_id="s"), caplog)


@pytest.mark.parametrize("value", [None, 7, 1.5, True, "p", ["p"], [], b"p", {1: "p"}, object()])
def test_a_value_that_is_no_object_names_nobody(
    value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert "kvtier" in warning_about(custom(value, session_id="s"), caplog)


@pytest.mark.parametrize("carrier", ["routing_key", "session_id"])
@pytest.mark.parametrize("name", ["x" * 257, 7, ["p"], {"program": "p"}])
def test_a_malformed_routing_key_or_session_names_nobody(
    carrier: str, name: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert "program" in warning_about(Request(**{carrier: name}), caplog)


@pytest.mark.parametrize("params", ["kvtier", ["kvtier"], 7, True, 1.5])
def test_custom_params_that_are_no_object_name_nobody_and_harm_nobody(
    params: Any, caplog: pytest.LogCaptureFixture
) -> None:
    request = Request(SamplingParams(params), session_id="s")
    assert "custom_params" in warning_about(request, caplog)


@pytest.mark.parametrize("name", ["a\nb", "x\r\nforged", "long" * 10_000])
def test_the_name_of_an_unknown_field_cannot_forge_or_flood_the_log(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(warning_about(custom({"program": "p", name: 1}), caplog)) < 1000


@pytest.mark.parametrize("make", [custom, hinted])
def test_a_name_that_cannot_be_written_as_json_names_nobody(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    lone_surrogate = "p\ud800"  # json.loads makes it of "\\ud800"
    assert "program" in warning_about(make({"program": lone_surrogate}), caplog)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
FIELD = st.sampled_from(("program", "label", "epoch")) | st.text(max_size=5)
JSON = st.recursive(
    SCALARS | st.sampled_from(Label).map(str),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELD, inner, max_size=4),
    max_leaves=8,
)


@given(value=JSON, key=SCALARS, session=SCALARS)
def test_no_value_of_any_carrier_raises(value: Any, key: Any, session: Any) -> None:
    requests = (custom(value), Request(routing_key=key, session_id=session))
    for found in map(identity_of, requests):
        if found is not None:
            assert 1 <= len(found.program) <= 256
            assert found.label is None or isinstance(found.label, Label)
            assert found.epoch is None or 0 <= found.epoch < 2**63
