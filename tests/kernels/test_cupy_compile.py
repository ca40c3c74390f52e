"""`CupyCopy` without a GPU: its machine code, its imports, and what it says is missing."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kvtier.errors import CopyError
from kvtier.kernels.cuda_source import KERNEL_NAME, SOURCE, VARIANTS, WORDS_IN_FLIGHT, Variant
from kvtier.kernels.cupy_views import array_over, numpy_name, page_array, segment_array
from kvtier.kernels.pool import PagedPool

ARCHS = ("sm_90a", "sm_100a")
MAX_REGISTERS = 64
_ACCESS = {16: "E.EF.128", 4: "E.EF", 1: "E.EF.U8"}
_OPCODE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]*)")

needs_cupy = pytest.mark.skipif(
    importlib.util.find_spec("cupy") is None, reason="needs CuPy: pip install 'kvtier[gpu]'"
)
each_arch = pytest.mark.parametrize("arch", ARCHS)
each_variant = pytest.mark.parametrize(
    "variant",
    VARIANTS,
    ids=lambda v: f"word{v.word_bytes}-{'scatter' if v.scatter else 'gather'}{'-sum' * v.checksum}",
)


@dataclass(frozen=True)
class MachineCode:
    """Opcodes by how often they occur, and the resources that the kernel takes."""

    opcodes: Counter[str]
    resources: dict[str, int]

    def named(self, *prefixes: str) -> dict[str, int]:
        return {name: n for name, n in self.opcodes.items() if name.startswith(prefixes)}


@functools.cache
def machine_code(variant: Variant, arch: str) -> MachineCode:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(_compile(variant, arch))
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        listing = _tool("nvdisasm", "-c", file.name)
    assert f"Function {KERNEL_NAME}:" in usage, "the source names its kernel otherwise"
    return MachineCode(
        Counter(_OPCODE.findall(listing)),
        {name: int(value) for name, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage)},
    )


def _compile(variant: Variant, arch: str) -> bytes:
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(SOURCE, f"{KERNEL_NAME}.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*variant.options, f"-arch={arch}"))
        assert nvrtc.getProgramLog(program) == "", "the compiler warns"
        # CuPy takes the last byte for the end of a string; it is part of the ELF file.
        return nvrtc.getCUBIN(program) + b"\0"
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))
    finally:
        nvrtc.destroyProgram(program)


def _tool(name: str, *arguments: str) -> str:
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        pytest.skip(f"needs {name}, which comes with Triton: pip install 'kvtier[runtime]'")
    tool = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / name
    run = subprocess.run([str(tool), *arguments], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


@needs_cupy
@each_arch
@each_variant
def test_rows_move_in_whole_words_without_detour_or_spill(variant: Variant, arch: str) -> None:
    code = machine_code(variant, arch)
    access = _ACCESS[variant.word_bytes]
    assert code.named("STG") == {f"STG.{access}": WORDS_IN_FLIGHT}
    table_and_ids = {"LDG.E.64": 4, "LDG.E": 1}
    assert code.named("LDG") == {f"LDG.{access}": WORDS_IN_FLIGHT, **table_and_ids}
    assert not code.named("LD.", "ST.", "LDL", "STL", "LDS", "STS", "BAR")
    assert code.resources["STACK"] == code.resources["LOCAL"] == code.resources["SHARED"] == 0
    assert code.resources["REG"] <= MAX_REGISTERS


@needs_cupy
@each_arch
@each_variant
def test_sums_are_added_by_one_atomic_of_a_warp(variant: Variant, arch: str) -> None:
    code = machine_code(variant, arch)
    atomics = code.named("RED", "ATOM")
    assert sum(atomics.values()) == int(variant.checksum)
    assert all(".ADD.64" in name for name in atomics)
    assert bool(code.named("SHFL")) == variant.checksum


def run_without_gpu(code: str) -> subprocess.CompletedProcess[str]:
    """Run in a process of its own that sees no GPU, with warnings as errors."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )


_SAY = """
from kvtier.errors import CopyError
from kvtier.kernels.cupy_copy import CupyCopy
try:
    CupyCopy()
except CopyError as error:
    print(error)
"""


@needs_cupy
def test_without_a_gpu_it_imports_and_says_in_one_line_what_is_missing() -> None:
    run = run_without_gpu(f"import cupy, kvtier.kernels.cupy_views{_SAY}")
    assert run.stderr == ""
    assert run.stdout.startswith("CuPy finds no CUDA device")
    assert run.stdout.count("\n") == 1


def test_without_cupy_it_imports_and_says_how_to_install_it() -> None:
    run = run_without_gpu(f"import sys\nsys.modules['cupy'] = None{_SAY}")
    assert run.stderr == ""
    assert run.stdout.startswith("CuPy is not installed or cannot be imported")
    assert "pip install 'kvtier[gpu]'" in run.stdout
    assert run.stdout.count("\n") == 1


def test_importing_does_not_import_cupy() -> None:
    run = run_without_gpu(
        "import sys, kvtier.kernels.cupy_copy, kvtier.kernels.cupy_views\n"
        "print('cupy' in sys.modules)"
    )
    assert (run.stderr, run.stdout) == ("", "False\n")


def host_pool() -> PagedPool:
    return PagedPool.of([torch.zeros(4, 8, dtype=torch.bfloat16), torch.zeros(4, 3)])


def test_views_are_of_pools_on_a_gpu_only() -> None:
    with pytest.raises(CopyError, match=r"the pool is on cpu.*CpuCopy"):
        segment_array(host_pool(), 0)


@pytest.mark.parametrize("page", [-1, 4])
def test_a_view_of_a_page_that_is_not_there_is_an_error(page: int) -> None:
    with pytest.raises(CopyError, match=f"page {page} is outside the pool of 4 pages"):
        page_array(host_pool(), 0, page)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.bfloat16, "uint16"),
        (torch.float8_e4m3fn, "uint8"),
        (torch.float8_e5m2, "uint8"),
        (torch.float16, "float16"),
        (torch.float32, "float32"),
        (torch.uint8, "uint8"),
        (torch.bool, "bool"),
    ],
)
def test_types_that_numpy_has_not_are_seen_as_their_bits(dtype: torch.dtype, name: str) -> None:
    assert numpy_name(dtype) == name


@needs_cupy
def test_a_view_has_the_addresses_shape_and_strides_of_its_tensor() -> None:
    import cupy

    tensor = torch.zeros(4, 2, 8, dtype=torch.bfloat16)[:, 1]
    array = array_over(cupy, tensor, 0)
    assert array.data.ptr == tensor.data_ptr()
    assert array.shape == (4, 8)
    assert array.strides == (32, 2)
    assert array.dtype == "uint16"
    assert array[3].data.ptr == tensor[3].data_ptr()
    assert array.data.mem.size == 3 * 32 + 16
