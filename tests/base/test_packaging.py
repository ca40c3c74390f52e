"""What a wheel and an sdist hold."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("kvtier", "kernels", "integration", "tests", "perf")
FILES = ("pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist, and the wheel built from it, of a copy of the checkout."""
    checkout = tmp_path_factory.mktemp("checkout")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, checkout / name, symlinks=True, ignore=ignored)
    for name in FILES:
        shutil.copy(ROOT / name, checkout)
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist"],
        cwd=checkout,
        capture_output=True,
        check=True,
    )
    return checkout / "dist"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(next(dist.glob("*.whl")))


def test_a_wheel_installs_no_other_top_level_package(wheel: zipfile.ZipFile) -> None:
    tops = {PurePosixPath(name).parts[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"kvtier"}


@pytest.mark.parametrize("name", ["kernels", "integration"])
def test_linked_folders_become_files_of_the_package(
    dist: Path, wheel: zipfile.ZipFile, name: str
) -> None:
    source = (ROOT / name / "__init__.py").read_bytes()
    assert wheel.read(f"kvtier/{name}/__init__.py") == source
    with tarfile.open(next(dist.glob("*.tar.gz"))) as sdist:
        members = {PurePosixPath(member.name): member for member in sdist.getmembers()}
    root = next(iter(members)).parts[0]
    assert members[PurePosixPath(root, "kvtier", name, "__init__.py")].isfile()


def test_the_links_of_the_checkout_are_relative() -> None:
    for name in ("kernels", "integration"):
        assert (ROOT / "kvtier" / name).readlink() == Path("..", name)


def test_a_wheel_holds_every_module_of_the_checkout(wheel: zipfile.ZipFile) -> None:
    modules = {
        str(path.relative_to(ROOT))
        for folder, pattern in ((ROOT / "kvtier", "**/*.py"), (ROOT / "kvtier", "py.typed"))
        for path in folder.glob(pattern)
    }
    assert modules - set(wheel.namelist()) == set()


def test_a_wheel_carries_licence_command_and_light_dependencies(wheel: zipfile.ZipFile) -> None:
    info = next(name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name)
    metadata = wheel.read(f"{info}/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert f"{info}/licenses/LICENSE" in wheel.namelist()
    assert "kvtier = kvtier.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()
    required = [
        line.removeprefix("Requires-Dist: ")
        for line in metadata.splitlines()
        if line.startswith("Requires-Dist: ") and "extra ==" not in line
    ]
    assert not [name for name in required if name.startswith(("torch", "triton", "fastapi"))]
    assert len(required) == 6
