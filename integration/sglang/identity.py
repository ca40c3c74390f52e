"""Whose request is this: program id, label and epoch out of what SGLang carries to the tree."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from kvtier.integration.sglang.control.protocol import Epoch, ProgramId
from kvtier.scheduling.commands import Label

_LOG = logging.getLogger(__name__)
HINT_TYPE = "kvtier"


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`custom_params["kvtier"]` of a request; a label without an epoch counts as current."""

    program: ProgramId
    label: Label | None = None
    epoch: Epoch | None = None


def identity_of(req: Any) -> Identity | None:
    """The request's program, from the first of these that names one; None where none does.

    `sampling_params.custom_params["kvtier"]`, an action of type "kvtier" in `kv_hints`, the routing
    key (header x-smg-routing-key), `session_id`. What is there but malformed is reported in the log
    and names nobody: a request is served, whatever its labels are.
    """
    custom = getattr(req.sampling_params, "custom_params", None) or {}
    if "kvtier" in custom:
        return _convert(custom["kvtier"], req.rid)
    hints = getattr(req, "kv_hints", None)
    for action in hints.actions if hints is not None else ():
        if action.action_type == HINT_TYPE:
            return _convert(action.payload, req.rid)
    name = getattr(req, "routing_key", None) or getattr(req, "session_id", None)
    return _convert({"program": name}, req.rid) if name else None


def _convert(value: object, request: str) -> Identity | None:
    try:
        return msgspec.convert(value, Identity)
    except msgspec.ValidationError as error:
        _LOG.warning("request %s: kvtier ignores its labels: %s", request, error)
        return None
