"""Every shipped kernel compiles without a GPU, moves wide words, and spills nothing.

Needs a process with TRITON_INTERPRET unset: interpreted kernels cannot be compiled.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton: pip install 'kvtier[kernels-test]'")

from kvtier.errors import ConfigError
from kvtier.kernels import triton_kernels
from kvtier.kernels.forms import Form, make_shape
from kvtier.kernels.triton_copy import SHIPPED, ShippedKernel, interpreted
from perf import sass

CHECKED_ARCHS = (90, 100)
OTHER_ARCHS = tuple(arch for arch in sass.ARCHS if arch not in CHECKED_ARCHS)
HINTS = ("base", "packed")


@dataclass(frozen=True)
class Bound:
    """What a class of kernels may use, on every arch."""

    max_registers: int
    max_barriers: int
    max_shared_bytes: int
    reason: str


def bound_of(spec: ShippedKernel) -> Bound:
    return (SUM if spec.check else PLAIN)[spec.shape.word_bytes]


PLAIN = {
    16: Bound(64, 0, 0, "8 programs of 128 threads share the 64 K registers of an SM"),
    4: Bound(80, 0, 0, "32 addresses and values of 4 bytes a thread in flight"),
    1: Bound(96, 0, 0, "as 4-byte words; such rows are rare and short"),
}
SUM = {
    16: Bound(96, 4, 2048, "64-bit weights of 8 accesses; 5 programs an SM keep 80 KB in flight"),
    4: Bound(128, 4, 2048, "64-bit weights of 32 words a thread; 4 programs an SM"),
    1: Bound(128, 4, 2048, "as 4-byte words"),
}
# Rows that no shipped shape has but callers may: what is unrolled over them must not pile up.
UNUSUAL = [
    (Form.PERSISTENT, 262144, 16),
    (Form.PERSISTENT, 18436, 4),
    (Form.PERSISTENT, 18433, 1),
    (Form.PAGE, 18433, 1),
    (Form.MIXED, 18436, 4),
    (Form.SMALL, 1028, 4),
]


@pytest.fixture(autouse=True, scope="module")
def _compiling() -> None:
    if interpreted():
        pytest.fail(
            "kernels are interpreted in this process; unset TRITON_INTERPRET", pytrace=False
        )


@cache
def report_of(spec: ShippedKernel, arch: int) -> sass.SassReport:
    return compile_as(spec, spec.function, arch)


def compile_as(spec: ShippedKernel, function: Any, arch: int) -> sass.SassReport:
    shape = spec.shape
    return sass.inspect(
        function, spec.constants, arch, shape.num_warps, word_bytes=shape.word_bytes
    )


def faults(spec: ShippedKernel, report: sass.SassReport) -> list[str]:
    """Every rule that the machine code breaks; empty for a good kernel."""
    bound = bound_of(spec)
    width = 8 * spec.shape.word_bytes
    rules = {
        f"accesses of other than {width} bits": {*report.loads, *report.stores} == {width},
        "loads and stores differ in number": report.loads == report.stores,
        "stores outside pages": report.num_other_stores == 0,
        "spills": not report.spills,
        f"above {bound.max_registers} registers": report.num_registers <= bound.max_registers,
        f"above {bound.max_barriers} barriers": report.num_barriers <= bound.max_barriers,
        f"above {bound.max_shared_bytes} bytes of shared memory": (
            report.shared_bytes <= bound.max_shared_bytes
            and (bound.max_shared_bytes > 0 or report.num_shared_accesses == 0)
        ),
        "atomics without a checksum, or none with one": (report.num_atomics > 0) == spec.check,
    }
    return [rule for rule, kept in rules.items() if not kept]


@pytest.mark.parametrize("arch", CHECKED_ARCHS)
@pytest.mark.parametrize("spec", SHIPPED, ids=lambda spec: spec.name)
def test_shipped_kernels_move_whole_words_and_keep_their_bounds(
    spec: ShippedKernel, arch: int
) -> None:
    report = report_of(spec, arch)
    assert faults(spec, report) == [], (report, bound_of(spec).reason)


def test_plain_copies_of_16_byte_words_keep_the_strict_bound() -> None:
    strict = [spec for spec in SHIPPED if spec.shape.word_bytes == 16 and not spec.check]
    assert {spec.shape.form for spec in strict} == set(Form)
    for spec in strict:
        assert bound_of(spec) == Bound(64, 0, 0, PLAIN[16].reason)


@pytest.mark.parametrize("arch", OTHER_ARCHS)
@pytest.mark.parametrize("form", Form)
def test_every_form_keeps_its_bounds_on_the_other_archs(form: Form, arch: int) -> None:
    spec = next(spec for spec in SHIPPED if spec.shape.form is form)
    report = report_of(spec, arch)
    assert faults(spec, report) == [], report


@pytest.mark.parametrize(("form", "row_bytes", "word_bytes"), UNUSUAL)
def test_long_rows_and_narrow_words_keep_the_bounds_too(
    form: Form, row_bytes: int, word_bytes: int
) -> None:
    shape = make_shape(form, row_bytes, word_bytes)
    spec = ShippedKernel("unusual", shape, scatter=False, check=True)
    report = report_of(spec, 100)
    assert faults(spec, report) == [], report


@pytest.mark.parametrize("hint", HINTS)
@pytest.mark.parametrize("form", Form)
def test_a_missing_alignment_hint_is_found(form: Form, hint: str, tmp_path: Path) -> None:
    spec = next(spec for spec in SHIPPED if spec.shape.form is form)
    assert faults(spec, report_of(spec, 90)) == []
    worse = without_hint(spec.function.__name__, hint, tmp_path)
    found = faults(spec, compile_as(spec, worse, 90))
    assert "accesses of other than 128 bits" in found


def without_hint(name: str, hint: str, folder: Path) -> Any:
    """The kernel `name` compiled from a copy of its source without one of its two hints.

    "base" is the hint on the pool's pointer, "packed" the other one.
    """
    source = inspect.getsource(triton_kernels)
    begin = source.index(f"def {name}(")
    lines = list(re.finditer(r"(\w+) = tl\.multiple_of\(\1, 16\)", source[begin:]))[: len(HINTS)]
    assert (lines[0][1] == "base", lines[1][1] == "base") == (True, False)
    line = lines[HINTS.index(hint)]
    start, end = begin + line.start(), begin + line.end()
    path = folder / f"{name}_without_{hint}.py"
    path.write_text(f"{source[:start]}pass{source[end:]}", encoding="utf-8")
    described = importlib.util.spec_from_file_location(path.stem, path)
    assert described is not None
    assert described.loader is not None
    module = importlib.util.module_from_spec(described)
    described.loader.exec_module(module)
    return getattr(module, name)


def test_an_interpreted_kernel_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"unset TRITON_INTERPRET"):
        sass.inspect(lambda: None, {}, 90, 4)  # type: ignore[arg-type]


LISTING = """
        /*0010*/                   LDG.E.64 R6, desc[UR14][R2.64+0x8] ;
        /*0020*/              @!P1 LDG.E.EF.128 R16, desc[UR14][R8.64+0x4] ;
        /*0030*/            @!UPT  LDG.E.EF.U8 R4, desc[UR14][R8.64] ;
        /*0040*/                   LDG.E.EF.U16.CONSTANT R4, desc[UR14][R8.64] ;
        /*0050*/                   LDG.E.EF R4, desc[UR14][R8.64] ;
        /*0060*/                   STG.E.EF.64 desc[UR14][R2.64], R4 ;
        /*0070*/                   STG.E desc[UR14][R2.64], R4 ;
        /*0080*/                   STL.64 [R1+0x8], R4 ;
        /*0090*/                   LDL R4, [R1] ;
        /*00a0*/                   LDGSTS.E.BYPASS.128 [R3], desc[UR14][R8.64] ;
        /*00b0*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*00c0*/               @P0 RED.E.ADD.64.STRONG.GPU desc[UR14][R2.64], R4 ;
        /*00d0*/                   NOP ;
"""


def test_a_listing_is_counted_by_width_and_kind() -> None:
    used = "Function k:\n  REG:28 STACK:8 SHARED:1024 LOCAL:0 CONSTANT[0]:576 TEXTURE:0"
    report = sass.read_listing(90, used, LISTING, 32)
    assert report == sass.SassReport(
        arch=90,
        num_registers=28,
        stack_bytes=8,
        local_bytes=0,
        shared_bytes=1056,
        num_instructions=12,
        loads={8: 1, 16: 1, 32: 1, 128: 1},
        stores={64: 1},
        num_table_loads=1,
        num_other_stores=1,
        num_atomics=1,
        num_spills=2,
        num_shared_accesses=1,
        num_barriers=1,
    )
    assert report.spills


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--json", "/proc/none/file"], "--json /proc/none/file: cannot be written"),
        (["--arch", "91"], "unknown arch '91'; choose from"),
        (["--arch", "90,"], "unknown arch ''; choose from"),
    ],
)
def test_wrong_flags_end_in_one_line_before_anything_is_compiled(
    flags: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["sass", *flags])
    with pytest.raises(SystemExit) as caught:
        sass.main()
    said = capsys.readouterr()
    assert (caught.value.code, said.out) == (2, "")
    assert message in said.err.splitlines()[-1]


def test_each_arch_is_compiled_once_and_results_are_appended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text('{"earlier": 1}\n')
    monkeypatch.setattr("sys.argv", ["sass", "--arch", "90,90", "--json", str(file)])
    sass.main()
    earlier, *records = map(json.loads, file.read_text().splitlines())
    assert earlier == {"earlier": 1}
    assert [(r["kernel"], r["arch"]) for r in records] == [(spec.name, 90) for spec in SHIPPED]


def test_an_empty_listing_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no machine code for sm_90"):
        sass.read_listing(90, "", "", 0)
