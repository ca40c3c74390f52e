"""The CUDA C of `CupyCopy` and its launch geometry, without a GPU."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.kernels.cuda_source import (
    BLOCK_THREADS,
    VARIANTS,
    WORDS_IN_FLIGHT,
    Variant,
    make_geometry,
)

from .cases import CASES, Case, build
from .checks import check_gather, check_parts, check_scatter
from .host_cuda import HostCudaCopy, compile_for_host

_PARTED = [case for case in CASES if case.ids and 2 <= len(case.typed) <= 8 and not case.is_far]

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
with_and_without_sums = pytest.mark.parametrize("sums", [False, True], ids=["plain", "sums"])
# Few blocks have to stride over pages, segments and pieces of rows.
each_bound = pytest.mark.parametrize("max_blocks", [None, 3], ids=["all-blocks", "3-blocks"])


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[Variant, ctypes.CDLL]:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++ to run the CUDA source on the host")
    folder: Path = tmp_path_factory.mktemp("cuda-on-host")
    return {variant: compile_for_host(variant, compiler, folder) for variant in VARIANTS}


def need_address_space(case: Case) -> None:
    """Skip where the host refuses to map a far pool, which takes no memory."""
    if case.is_far:
        try:
            build(case, "cpu")
        except OSError as error:
            pytest.skip(f"needs {2 * case.pool_bytes / 1e9:.0f} GB of address space: {error}")


@each_case
@with_and_without_sums
@each_bound
def test_the_source_gathers_every_byte(
    libraries: dict[Variant, ctypes.CDLL], case: Case, sums: bool, max_blocks: int | None
) -> None:
    need_address_space(case)
    check_gather(HostCudaCopy(libraries, max_blocks), case, "cpu", sums=sums)


@each_case
@with_and_without_sums
@each_bound
def test_the_source_scatters_every_byte_and_no_other(
    libraries: dict[Variant, ctypes.CDLL], case: Case, sums: bool, max_blocks: int | None
) -> None:
    need_address_space(case)
    check_scatter(HostCudaCopy(libraries, max_blocks), case, "cpu", sums=sums)


@pytest.mark.parametrize("case", _PARTED, ids=lambda case: case.name)
def test_the_source_copies_parts_of_a_pool(
    libraries: dict[Variant, ctypes.CDLL], case: Case
) -> None:
    check_parts(HostCudaCopy(libraries, None), case, "cpu")


@given(
    num_ids=st.integers(1, 1 << 31),
    num_segments=st.integers(1, 1 << 17),
    row_words=st.integers(1, 1 << 40),
    max_blocks=st.none() | st.integers(1, 1 << 20),
)
def test_a_geometry_is_within_the_limits_of_a_launch(
    num_ids: int, num_segments: int, row_words: int, max_blocks: int | None
) -> None:
    geometry = make_geometry(num_ids, num_segments, row_words, max_blocks)
    x, y, z = geometry.grid
    assert 1 <= x <= 2**31 - 1
    assert 1 <= y <= 65535
    assert 1 <= z <= 65535
    assert max_blocks is None or x * y * z <= max_blocks
    lanes, pages, _ = geometry.block
    assert lanes * pages == BLOCK_THREADS
    assert lanes % 32 == 0, "a warp's sum is of one page"


@pytest.mark.parametrize(
    ("row_words", "lanes", "pieces"),
    [(1, 32, 1), (128, 32, 1), (129, 64, 1), (1024, 256, 1), (1025, 256, 2), (2048, 256, 2)],
)
def test_a_row_takes_the_fewest_warps_that_hold_it(row_words: int, lanes: int, pieces: int) -> None:
    geometry = make_geometry(10, 3, row_words)
    assert geometry.block == (lanes, BLOCK_THREADS // lanes, 1)
    assert geometry.grid[1:] == (3, pieces)
    assert pieces * lanes * WORDS_IN_FLIGHT >= row_words
