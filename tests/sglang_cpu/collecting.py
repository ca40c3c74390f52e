"""Collects test modules that import SGLang, whose imports warn a lot, or which is not there."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from importlib.util import find_spec

import pytest

MISSING = "SGLang is not installed here; see tests/sglang_cpu/README.md"
# That come with SGLang's environment and no other.
_PACKAGES = frozenset({"psutil", "safetensors", "sglang", "tokenizers"})
# By the module that warns. Warnings of kvtier and of the tests stay errors.
_FOREIGN = r"(sglang|torch|torchvision|transformers|triton|importlib)\b"


def is_installed() -> bool:
    """Whether `import sglang` can work, after `shim.install`."""
    return find_spec("sglang") is not None


def skip_where_missing() -> None:
    """Skip the test or module unless SGLang is there; fail where CI is set, which must have it."""
    if is_installed():
        return
    if os.environ.get("CI"):
        pytest.fail(MISSING, pytrace=False)
    pytest.skip(MISSING, allow_module_level=True)


class SglangModule(pytest.Module):
    """A test module that may import SGLang at its top."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        self.add_marker(pytest.mark.filterwarnings(f"ignore:::{_FOREIGN}"))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                warnings.filterwarnings("error", module=r"(kvtier|tests)\b")
                return list(super().collect())
        except self.CollectError as error:
            if not _lacks_sglang(error.__cause__):
                raise
        skip_where_missing()
        raise self.CollectError(f"SGLang is there, but not all of {sorted(_PACKAGES)}")


def _lacks_sglang(cause: BaseException | None) -> bool:
    return isinstance(cause, ModuleNotFoundError) and (cause.name or "").split(".")[0] in _PACKAGES
