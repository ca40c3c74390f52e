"""What backends are made with: choices by name, counts, and what importing them needs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton: pip install 'kvtier[kernels-test]'")

import torch

from kvtier.errors import ConfigError, CopyError
from kvtier.kernels.backend import CopyBackend
from kvtier.kernels.cpu import CpuCopy
from kvtier.kernels.cpu_rows import CpuMethod
from kvtier.kernels.cupy_copy import CupyCopy
from kvtier.kernels.forms import Form
from kvtier.kernels.pool import PagedPool
from kvtier.kernels.triton_copy import TritonCopy

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("method", CpuMethod)
def test_a_method_is_taken_by_its_value_too(method: CpuMethod) -> None:
    assert CpuCopy(method=method.value).method is CpuCopy(method=method).method is method


@pytest.mark.parametrize("form", Form)
def test_a_form_is_taken_by_its_value_too(form: Form) -> None:
    assert TritonCopy(form=form.value).form is TritonCopy(form).form is form


@pytest.mark.parametrize("verb", ["gather", "scatter"])
@pytest.mark.parametrize("method", ["flat", CpuMethod.FLAT])
def test_a_forced_method_that_cannot_copy_writes_nothing(method: str, verb: str) -> None:
    whole = torch.arange(1600).to(torch.uint8).view(16, 100)
    pool, packed = PagedPool.of([whole[:, :60]]), torch.full((3, 60), 7, dtype=torch.uint8)
    before = whole.clone()
    with CpuCopy(method=method) as copy, pytest.raises(CopyError, match="method flat cannot do"):
        getattr(copy, verb)(pool, [3, 9, 1], packed)
    assert torch.equal(whole, before)
    assert bool((packed == 7).all())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CpuCopy(method="bogus"), "method='bogus'; choose from flat, runs, segments"),
        (lambda: CpuCopy(method=Form.PAGE), "method=.*choose from flat, runs, segments"),
        (lambda: TritonCopy("bogus"), "form='bogus'; choose from page, small, persistent, mixed"),
        (lambda: TritonCopy(3), "form=3; choose from"),
        *(
            (lambda make=make, count=count: make(count), f"{name}={count!r}; pass an integer")
            for name, make in (
                ("num_threads", CpuCopy),
                ("num_programs", lambda count: TritonCopy(num_programs=count)),
                ("max_blocks", CupyCopy),
            )
            for count in (0, -1, 1.5, "2", True)
        ),
    ],
)
def test_other_arguments_are_refused_in_one_line(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [CpuCopy, TritonCopy])
def test_every_backend_is_a_context_manager_and_closed_after_it(
    make: Callable[[], CopyBackend],
) -> None:
    pool, packed = PagedPool.of([torch.zeros(2, 8)]), torch.empty(1, 32, dtype=torch.uint8)
    with make() as copy:
        pass
    copy.close()
    for call in (copy.gather, copy.scatter):
        with pytest.raises(CopyError, match=f"this {make.__name__} is closed"):
            call(pool, [0], packed)


_IMPORT_ALL = """
import pkgutil, sys
import kvtier.kernels
sys.modules[sys.argv[1]] = None
for module in pkgutil.iter_modules(["kernels"]):
    try:
        __import__(f"kvtier.kernels.{module.name}")
    except ModuleNotFoundError as error:
        print(f"{module.name}: {error}")
"""


@pytest.mark.parametrize(
    ("library", "message", "free"),
    [
        (
            "torch",
            "kvtier.kernels needs torch: pip install 'kvtier[runtime]', or 'kvtier[gpu]' for a GPU",
            {"arguments", "crew", "forms", "overlap", "with_triton", "triton_kernels"},
        ),
        ("triton", "the Triton kernels need triton: pip install 'kvtier[gpu]'", {"cpu", "pool"}),
    ],
)
def test_without_a_library_each_module_imports_or_says_what_to_install(
    library: str, message: str, free: set[str]
) -> None:
    command = [sys.executable, "-W", "error", "-c", _IMPORT_ALL, library]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert (done.stderr, set(said.values())) == ("", {message})
    assert "triton_copy" in said
    assert not free & set(said)
