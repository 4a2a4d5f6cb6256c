"""The house: one idea a file, functions that can be read at once, folders that say what
they hold.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py")) + sorted((ROOT / "lab" / "src").rglob("*.py"))

GROUP = 40
"""Lines from which definitions that never name one another are an idea of their own."""
SEVERAL = {
    "src/assay/option_types.py": "written by a program: the options of each function, as types",
    "src/assay/engines/server/errors.py": "siblings: one error a kind of answer, with two bases",
    "src/assay/checkpoint/patterns.py": "siblings: one pattern over layers a check, one caller",
    "src/assay/coherence/language.py": "classes of characters and of words, read as one table",
}
"""Files with unconnected groups, and why they are right."""

LONGEST, MOST_PARAMETERS = 80, 8
LARGER = {
    "src/assay/options.py:option": "a field of a dataclass: every property of an option",
    "src/assay/serving/launch.py:launched": "everything that one start of a server depends on",
    "src/assay/serving/symptoms.py:measure": "everything that one look at a server depends on",
    "lab/src/assay_lab/kv/blocks_gpu.py:_group": "builds a GPU kernel's source for one shape",
    "lab/src/assay_lab/kv/pages/backend.py:__init__": "the signature is vLLM's",
    "lab/src/assay_lab/kv/pages/backend.py:forward": "the signature is vLLM's",
    "lab/src/assay_lab/kv/pages/launch.py:prepare": "launches a kernel with its arguments",
    "lab/src/assay_lab/kv/pages/launch.py:attend": "launches a kernel with its arguments",
    "lab/src/assay_lab/kv/pages/launch.py:unpack": "launches a kernel with its arguments",
    "lab/src/assay_lab/kv/pages/launch.py:check": "one case of every kernel beside the reference",
    "lab/src/assay_lab/trellis_loops.py:_butterfly": "compiled: one step of a search over arrays",
}
"""Functions beyond the limits that are no GPU kernels, and why."""


def place(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def groups(tree: ast.Module) -> list[tuple[int, list[str]]]:
    """The definitions of a file in groups that name one another: lines and names, the largest
    first. Two that name the same third one are of one group.
    """
    sizes: dict[str, int] = {}
    uses: dict[str, set[str]] = {}
    for node in tree.body:
        names = list(_defined(node))
        mentioned = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        mentioned |= {n.value for n in ast.walk(node) if _is_quoted_name(n)}
        for number, name in enumerate(names):
            sizes[name] = 0 if number else (node.end_lineno or node.lineno) - node.lineno + 1
            uses[name] = mentioned | set(names)
    left, found = set(sizes), []
    while left:
        group, edge = set(), {left.pop()}
        while edge:
            group |= edge
            near = {u for name in edge for u in uses[name]} | {
                name for name in left if uses[name] & edge
            }
            edge = near & left
            left -= edge
        found.append((sum(sizes[n] for n in group), sorted(group)))
    return sorted(found, reverse=True)


def _defined(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign):
        yield from (n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id


def _is_quoted_name(node: ast.AST) -> bool:
    """Whether a constant is an annotation in quotes."""
    return (
        isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier()
    )


def test_groups_are_found() -> None:
    tree = ast.parse(
        "A = 1\ndef f():\n    return A\n\ndef g():\n    return h()\ndef h():\n    pass\n"
    )
    assert [names for _, names in groups(tree)] == [["g", "h"], ["A", "f"]]


def test_a_file_holds_one_idea() -> None:
    found = {}
    for path in SOURCES:
        large = [g for g in groups(ast.parse(path.read_text(encoding="utf-8"))) if g[0] >= GROUP]
        if len(large) > 1:
            found[place(path)] = [(lines, names[:4]) for lines, names in large]
    assert {f: g for f, g in found.items() if f not in SEVERAL} == {}
    assert set(SEVERAL) <= set(found), "an exception that is needed no more"


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_kernel(node):
                yield f"{place(path)}:{node.name}", node


def _is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a compiler for GPUs or numbers reads the function: it takes arrays, not objects."""
    text = " ".join(ast.unparse(d) for d in node.decorator_list)
    return bool(re.search(r"\b(?:jit|njit|kernel|compiled)\b", text))


def test_a_function_can_be_read_at_once() -> None:
    found = {}
    for name, node in functions():
        arguments = node.args
        names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        count = len([n for n in names if n not in ("self", "cls")])
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > LONGEST or count > MOST_PARAMETERS:
            found[name] = (lines, count)
    assert {n: f for n, f in found.items() if n not in LARGER} == {}
    assert set(LARGER) <= set(found), "an exception that is needed no more"


@pytest.mark.parametrize("path", [p for p in SOURCES if p.name == "__init__.py"], ids=place)
def test_a_folder_says_what_it_holds_and_no_more(path: Path) -> None:
    """A docstring and public names; imports of names may be put off until they are used."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)
    allowed = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.If, ast.Expr)
    lazy = ("__getattr__", "__dir__")
    rest = [
        n for n in tree.body if not isinstance(n, allowed) and getattr(n, "name", "") not in lazy
    ]
    if place(path) not in THIN:
        assert [getattr(n, "name", type(n).__name__) for n in rest] == []


THIN = {
    "src/assay/lab/__init__.py": "the old name of the laboratory, for one version",
    "lab/src/assay_lab/__init__.py": "the one function that is public",
    "lab/src/assay_lab/kv/pages/__init__.py": "the refusal that every caller of pages shares",
}


def test_there_are_no_rulers() -> None:
    ruler = re.compile(r"^\s*# ?[-=*]{8,}\s*$", re.M)
    assert [place(p) for p in SOURCES if ruler.search(p.read_text(encoding="utf-8"))] == []


def test_the_formatter_is_seldom_told_to_skip() -> None:
    count = sum(p.read_text(encoding="utf-8").count("# fmt: " + "skip") for p in SOURCES)
    assert count < 40
