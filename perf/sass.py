"""What the compiler makes of every shipped kernel: registers, spills, access widths. No GPU needed.

    python -m perf.sass [--arch 90,100] [--json FILE]

Compiles without launch-time facts on alignment (the worst case) and reads the machine code with
the cuobjdump and nvdisasm of Triton's own package. Runs with TRITON_INTERPRET unset.
"""

from __future__ import annotations

import argparse
import platform
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from rich.console import Console
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from kvtier import __version__
from kvtier.errors import ConfigError
from kvtier.kernels.triton_copy import SHIPPED
from perf.json_lines import append, check_writable

ARCHS = (80, 89, 90, 100, 103, 120)
"""A100, L40S, H100/H200, B200, B300, RTX PRO 6000: compute capability times 10."""

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_PACKED_TYPES = {16: "*i64", 4: "*i32", 1: "*u8"}
_ARGUMENT_TYPES = {"table": "*i64", "ids": "*i32", "sums": "*i64"}

# "/*01f0*/  @!P1 LDG.E.EF.128 R4, ..." -> "LDG.E.EF.128"
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")
_RESOURCE = re.compile(r"\b(REG|STACK|SHARED|LOCAL):(\d+)")
_WIDTH = re.compile(r"\.[US]?(8|16|64|128|256)\b")
_DEFAULT_WIDTH_BITS = 32

# Kernels mark accesses to pages as evict-first, those to the table and the ids never.
_STREAMED = ".EF"


@dataclass(frozen=True, slots=True)
class SassReport:
    """Machine code of one compiled kernel, counted. Widths are in bits; counts are static."""

    arch: int
    num_registers: int
    """Per thread."""
    stack_bytes: int
    local_bytes: int
    shared_bytes: int
    """Static and launch-time shared memory."""
    num_instructions: int
    """Without NOP."""
    loads: dict[int, int]
    """Width of one thread's load from a page or the packed buffer: number of instructions."""
    stores: dict[int, int]
    """The same of stores."""
    num_table_loads: int
    """Loads of the segment table and of page ids."""
    num_other_stores: int
    """Stores that are neither to a page nor to the packed buffer."""
    num_atomics: int
    num_spills: int
    """LDL and STL."""
    num_shared_accesses: int
    """LDS, STS, LDGSTS and their like."""
    num_barriers: int

    @property
    def spills(self) -> bool:
        return bool(self.num_spills or self.stack_bytes or self.local_bytes)


def inspect(
    kernel: JITFunction[Any],
    constants: Mapping[str, Any],
    arch: int,
    num_warps: int,
    *,
    word_bytes: int = 16,
) -> SassReport:
    """Compile `kernel` for sm_`arch` with these constexprs and count what came out.

    `word_bytes` (16, 4 or 1) gives the element type of `packed`. Raises ConfigError where kernels
    are interpreted: nothing can be compiled then.
    """
    if not isinstance(kernel, JITFunction):
        raise ConfigError("kernels are interpreted in this process; unset TRITON_INTERPRET")
    packed = {"packed": _PACKED_TYPES[word_bytes]}
    types = dict.fromkeys(kernel.arg_names, "i32") | _ARGUMENT_TYPES | packed
    signature = {
        name: "constexpr" if name in constants else types[name] for name in kernel.arg_names
    }
    compiled = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=dict(constants)),
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": num_warps},
    )
    resources, listing = _disassemble(compiled.asm["cubin"])
    return read_listing(arch, resources, listing, compiled.metadata.shared)


def _disassemble(cubin: bytes) -> tuple[str, str]:
    """The resource usage and the SASS of a compiled kernel, as the tools print them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return _run("cuobjdump", "-res-usage", file.name), _run("nvdisasm", "-c", "-ndf", file.name)


def _run(tool: str, *arguments: str) -> str:
    done = subprocess.run(
        [_TOOLS / tool, *arguments], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout


def read_listing(arch: int, resources: str, listing: str, shared_bytes: int) -> SassReport:
    """Count the output of `cuobjdump -res-usage` and of `nvdisasm -c` for one kernel."""
    used = {name: int(value) for name, value in _RESOURCE.findall(resources)}
    names = Counter(name for name in _INSTRUCTION.findall(listing) if name != "NOP")
    if not used or not names:
        raise ConfigError(f"no machine code for sm_{arch} in what the disassembler printed")
    loads, stores = _accesses(names, "LDG"), _accesses(names, "STG")
    return SassReport(
        arch=arch,
        num_registers=used["REG"],
        stack_bytes=used["STACK"],
        local_bytes=used["LOCAL"],
        shared_bytes=used["SHARED"] + shared_bytes,
        num_instructions=names.total(),
        loads=loads,
        stores=stores,
        num_table_loads=_count(names, "LDG") - sum(loads.values()),
        num_other_stores=_count(names, "STG") - sum(stores.values()),
        num_atomics=_count(names, "ATOM", "ATOMG", "RED", "REDG"),
        num_spills=_count(names, "LDL", "STL"),
        num_shared_accesses=_count(names, "LDS", "STS", "LDSM", "STSM", "LDGSTS", "ATOMS"),
        num_barriers=_count(names, "BAR"),
    )


def _count(names: Counter[str], *operations: str) -> int:
    return sum(count for name, count in names.items() if name.partition(".")[0] in operations)


def _accesses(names: Counter[str], operation: str) -> dict[int, int]:
    """Streamed accesses of one operation: width in bits -> number of instructions."""
    widths: Counter[int] = Counter()
    for name, count in names.items():
        if name.partition(".")[0] == operation and _STREAMED in name:
            width = _WIDTH.search(name)
            widths[int(width[1]) if width else _DEFAULT_WIDTH_BITS] += count
    return dict(sorted(widths.items()))


def rows(archs: Iterable[int]) -> Iterator[dict[str, Any]]:
    """One row for each shipped kernel and arch: its name and shape, then its SassReport."""
    for spec in SHIPPED:
        for arch in archs:
            report = inspect(
                spec.function,
                spec.constants,
                arch,
                spec.shape.num_warps,
                word_bytes=spec.shape.word_bytes,
            )
            shape = {**asdict(spec.shape), "form": spec.shape.form.value}
            yield {"case": "sass", "kernel": spec.name, "shape": shape, **asdict(report)}


def environment() -> dict[str, str]:
    """Versions that the figures depend on."""
    tools = ("ptxas", "ptxas-blackwell", "cuobjdump", "nvdisasm")
    return {
        "kvtier": __version__,
        "python": platform.python_version(),
        "triton": triton.__version__,
        **{tool: _version(tool) for tool in tools},
    }


def _version(tool: str) -> str:
    printed = _run(tool, "--version")
    found = re.search(r"\bV(\d+(?:\.\d+)+)", printed)
    if found is None:
        raise ConfigError(f"{tool} --version names no version: {printed.strip()!r}")
    return found[1]


def render(lines: Iterable[Mapping[str, Any]]) -> Table:
    """The rows as a table; accesses as `width in bits x count`."""
    table = Table(title="Machine code of the shipped kernels")
    names = ("kernel", "sm", "registers", "spills", "shared B", "instructions")
    for name in (*names, "loads", "stores", "table loads", "atomics", "barriers"):
        table.add_column(name, justify="left" if name == "kernel" else "right")
    for line in lines:
        spilled = f"{line['num_spills']} ({line['stack_bytes'] + line['local_bytes']} B)"
        cells = (
            line["kernel"],
            line["arch"],
            line["num_registers"],
            spilled if line["num_spills"] or line["stack_bytes"] or line["local_bytes"] else "-",
            line["shared_bytes"] or "-",
            line["num_instructions"],
            _widths(line["loads"]),
            _widths(line["stores"]),
            line["num_table_loads"],
            line["num_atomics"] or "-",
            line["num_barriers"] or "-",
        )
        table.add_row(*(str(cell) for cell in cells))
    return table


def _widths(counts: Mapping[int, int]) -> str:
    return " ".join(f"{width}x{count}" for width, count in counts.items()) or "-"


def _archs(text: str) -> tuple[int, ...]:
    """Argument type of --arch."""
    chosen = text.split(",")
    known = {str(arch): arch for arch in ARCHS}
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"unknown arch {unknown[0]!r}; choose from {', '.join(known)}, separated by commas"
        )
    return tuple(known[name] for name in dict.fromkeys(chosen))


def main() -> None:
    """Compile, print the table, and append JSON lines to a file where one is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--arch", type=_archs, default=ARCHS, help="for example 90,100")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append JSON lines to FILE")
    arguments = parser.parse_args()
    try:
        if arguments.json is not None:
            check_writable(arguments.json)
        lines = list(rows(arguments.arch))
        versions = environment()
    except ConfigError as error:
        parser.error(str(error))
    # In a pipe rich assumes 80 columns and would cut the figures.
    console = Console() if sys.stdout.isatty() else Console(width=140)
    console.print(render(lines))
    console.print(", ".join(f"{name} {version}" for name, version in versions.items()))
    if arguments.json is not None:
        append(arguments.json, ({**line, "environment": versions} for line in lines))


if __name__ == "__main__":
    main()
