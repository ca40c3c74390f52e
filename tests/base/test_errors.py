"""Messages of the exception tree."""

import pytest

from kvtier import errors


def test_every_error_has_the_common_root() -> None:
    kinds = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, Exception)
    }
    rooted = {kind for kind in kinds if issubclass(getattr(errors, kind), errors.KvtierError)}
    assert kinds == rooted
    assert {"ConfigError", "TraceError", "CapacityError", "UnknownNameError"} <= rooted


@pytest.mark.parametrize(
    ("given", "expected"), [("morri", "mori"), ("LRU", "lru"), ("lru+ofload", "lru+offload")]
)
def test_an_unknown_name_is_answered_with_the_nearest_and_all_known(
    given: str, expected: str
) -> None:
    error = errors.UnknownNameError("policy", given, ["lru", "lru+offload", "mori"])
    assert f"did you mean {expected!r}?" in str(error)
    assert "Known: lru, lru+offload, mori" in str(error)
    assert "\n" not in str(error)


def test_an_unknown_name_where_nothing_is_known_says_so() -> None:
    assert str(errors.UnknownNameError("policy", "x", [])) == (
        "unknown policy 'x': none is known here"
    )
