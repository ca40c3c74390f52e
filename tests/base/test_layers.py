"""What may import what."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"matplotlib", "msgspec", "numpy", "pydantic", "rich", "torch", "triton", "typer"}


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = Path(sys.executable).with_name("lint-imports")
    return subprocess.run(
        [str(command), "--no-cache"], cwd=folder, capture_output=True, text=True, check=False
    )


def imported_by(statement: str) -> set[str]:
    """Top-level modules in memory after `statement` in a fresh interpreter."""
    code = f"{statement}\nimport sys\nprint(*{{m.split('.')[0] for m in sys.modules}})"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(result.stdout.split())


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the package that a test may change."""
    for name in ("kvtier", "kernels", "integration"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_imports_point_down_only() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("module", "statement", "contract"),
    [
        ("scheduling/state.py", "import kvtier.traces", "Imports point down only"),
        ("traces/model.py", "import kvtier.cli", "Imports point down only"),
        ("layout/kv.py", "import torch", "The core needs no torch"),
        ("scheduling/state.py", "import kvtier.config", "take plain values"),
    ],
)
def test_an_import_that_points_up_is_found(
    checkout: Path, module: str, statement: str, contract: str
) -> None:
    path = checkout / "kvtier" / module
    path.write_text(f"{path.read_text()}\n{statement}\n")
    result = lint_imports(checkout)
    broken = [line for line in result.stdout.splitlines() if line.endswith("BROKEN")]
    assert result.returncode == 1
    assert any(contract in line for line in broken), result.stdout


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert imported_by("import kvtier") & HEAVY == set()


@pytest.mark.parametrize("module", ["scheduling", "layout", "hardware", "traces"])
def test_the_core_loads_no_configuration_and_no_terminal(module: str) -> None:
    allowed = {"msgspec", "numpy"}
    assert imported_by(f"import kvtier.{module}") & (HEAVY - allowed) == set()


@pytest.mark.parametrize(("name", "module"), [("kernels", "cpu"), ("integration", "sglang")])
def test_a_linked_folder_is_importable_under_the_package_only(name: str, module: str) -> None:
    program = f"import {name}; print(hasattr({name}, '__version__')); import {name}.{module}"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.stdout == "False\n"
    assert result.stderr.splitlines()[-1].endswith(f"No module named '{name}.{module}'")


def test_no_line_of_the_package_imports_torch() -> None:
    offending = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "kvtier").rglob("*.py")
        if any(
            line.split()[:2] in (["import", "torch"], ["from", "torch"])
            for line in path.read_text(encoding="utf-8").splitlines()
        )
    ]
    assert offending == []
