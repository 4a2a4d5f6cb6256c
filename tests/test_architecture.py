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
# Imported inside the functions that need them, everywhere.
NEVER_ON_TOP = {
    "torch", "transformers", "safetensors", "gguf", "vllm", "llama_cpp", "accelerate", "huggingface_hub", "numpy",
    "scipy", "jinja2", "rich", "prometheus_client", "numba",
}  # fmt: skip
ENGINES = {"torch", "transformers", "accelerate", "vllm", "llama_cpp"}
INSIDE_VLLM = "engines/vllm/forcing.py"
COMPILED = ("quant/hadamard_loops.py", "quant/packing_loops.py", "quant/trellis_loops.py")


def modules(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module.partition(".")[0]


def on_top(tree: ast.Module) -> set[str]:
    """What the import of a module imports; not what stands under `if TYPE_CHECKING`."""
    return {name for node in tree.body for name in modules(node)}


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def test_costly_packages_are_imported_where_they_are_used() -> None:
    found = {
        str(path.relative_to(PACKAGE)): names
        for path in sources()
        if (names := on_top(ast.parse(path.read_text(encoding="utf-8"))) & NEVER_ON_TOP)
    }
    # A report is drawn by modules that only the verb's end imports; a class of vLLM's is loaded by vLLM alone; compiled
    # loops are loaded by the first call that needs one.
    assert {path for path in found if not path.startswith(("report/", INSIDE_VLLM, *COMPILED))} == set()
    assert not any(names & ENGINES for path, names in found.items() if path != INSIDE_VLLM)


def test_no_engine_is_imported_by_the_core_at_all() -> None:
    # What works on tensors imports torch where it does so; text, checkpoints and logs never do.
    allowed = (
        "engines/hf/", "engines/vllm/", "engines/gguf/", "engines/scoring.py", "engines/continuing.py",
        "engines/transfer.py", "demo/", "checkpoint/meta_model.py",
        "fidelity/", "quant/", "kv/",
    )  # fmt: skip
    found = {
        str(path.relative_to(PACKAGE))
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.stmt) and ENGINES & set(modules(node))
    }
    assert {path for path in found if not path.startswith(allowed)} == set()


def test_every_probe_is_a_file_of_its_own_and_listed() -> None:
    from assay.coherence import probes

    text = (PACKAGE / "coherence" / "probes" / "__init__.py").read_text(encoding="utf-8")
    files = {p.stem for p in (PACKAGE / "coherence" / "probes").glob("*.py")} - {"__init__", "base"}
    assert all(f"probes.{name} import" in text for name in files)
    assert len(probes.NAMES) == len(set(probes.NAMES))


def test_arrows_between_layers_point_one_way() -> None:
    tool = Path(sys.executable).parent / "lint-imports"
    if not tool.exists():
        pytest.skip("import-linter is not installed")
    done = subprocess.run([tool], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout
