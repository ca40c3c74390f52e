"""Whose request is this: program id, label and epoch out of what SGLang carries to the tree."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from kvtier.ids import Label
from kvtier.integration.sglang.control.protocol import Epoch, ProgramId

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
    if not isinstance(custom, Mapping):
        _LOG.warning("request %s: kvtier ignores its custom_params: no object", req.rid)
        return None
    if "kvtier" in custom:
        return _convert(custom["kvtier"], req.rid, "custom_params.kvtier")
    hints = getattr(req, "kv_hints", None)
    for action in hints.actions if hints is not None else ():
        if action.action_type == HINT_TYPE:
            return _convert(action.payload, req.rid, "kv_hints")
    for carrier in ("routing_key", "session_id"):
        if name := getattr(req, carrier, None):
            return _convert({"program": name}, req.rid, carrier)
    return None


def _convert(value: object, request: str, carrier: str) -> Identity | None:
    try:
        identity = msgspec.convert(value, Identity)
        identity.program.encode()
    except msgspec.ValidationError as error:
        reason = " ".join(str(error).split())[:200]
    except UnicodeEncodeError:
        reason = "program is no valid Unicode"
    else:
        return identity
    _LOG.warning("request %s: kvtier ignores its %s: %s", request, carrier, reason)
    return None
