"""The layers of the package, and where the costly packages may be imported."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "assay"
ENGINES = {"torch", "transformers", "accelerate", "vllm", "llama_cpp"}
CORE = (
    "verdict",
    "report",
    "coherence",
    "checkpoint",
    "speculation",
    "stats",
    "serving",
    "gates",
    "monitor",
)
# What a core package may do with torch, inside the function of a program of its own that does it:
# ask transformers for a model on the meta device.
WITH_TORCH = {"checkpoint/meta_program.py"}


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """`assay.coherence.grading` for its file."""
    parts = ("assay", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


def is_module(name: str) -> bool:
    """Whether a dotted name is a module or a package of assay, not something in one."""
    place = PACKAGE.parent.joinpath(*name.split("."))
    return place.is_dir() or place.with_suffix(".py").is_file()


def imported(path: Path) -> Iterator[str]:
    """Every module that a file imports anywhere, within functions and for types alone too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            named = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from named
            if not all(is_module(name) for name in named):  # something of the package itself
                yield node.module


def test_no_engine_is_imported_by_the_core_at_all() -> None:
    found = {
        str(path.relative_to(PACKAGE))
        for path in sources()
        if path.relative_to(PACKAGE).parts[0].removesuffix(".py") in CORE
        and ENGINES & {module.partition(".")[0] for module in imported(path)}
    }
    assert found <= WITH_TORCH


def test_no_file_imports_itself_by_way_of_others() -> None:
    files = {name_of(path): path for path in sources()}
    arrows = {
        name: {m for m in imported(path) if m in files and m != name}
        for name, path in files.items()
    }
    # Leave out, again and again, what imports nothing that is left: what remains lies on or above a
    # circle.
    while done := {name for name, to in arrows.items() if not to & arrows.keys()}:
        arrows = {name: to for name, to in arrows.items() if name not in done}
    assert arrows == {}


def test_nothing_in_the_core_names_the_laboratory() -> None:
    """Not in an import, and not in a string that is imported later."""
    named = [str(path) for path in sources() if "assay_lab" in path.read_text(encoding="utf-8")]
    assert named == []


def test_every_folder_says_what_its_files_have_in_common() -> None:
    folders = [p for p in sources() if p.name == "__init__.py"]
    assert [
        str(p) for p in folders if not ast.get_docstring(ast.parse(p.read_text(encoding="utf-8")))
    ] == []


def test_arrows_between_layers_point_one_way() -> None:
    tool = Path(sys.executable).parent / "lint-imports"
    if not tool.exists():
        pytest.skip("import-linter is not installed")
    done = subprocess.run(
        [tool], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout


def test_no_two_test_files_share_a_name() -> None:
    """pytest imports one of two files of the same name, and reports the other as an error of
    collection.
    """
    folders = (ROOT / "tests", ROOT / "lab" / "tests")
    names = [path.name for folder in folders for path in folder.rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)
