"""An engine as it is written on the command line: a kind, a place, options after `?`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import parse_qsl

from assay.errors import AssayError, UsageError

Options = tuple[tuple[str, str], ...]
"""Names and values, in the order in which they were written."""


def full_spec(spec: str) -> str:
    """An engine as it is written in full: a folder or name alone is a model of transformers,
    `hf:MODEL`.
    """
    return spec if _KIND.match(spec) or not spec else f"hf:{spec}"


def with_options(spec: str, *, device: str, threads: int | str) -> str:
    """`spec` with `?device=` and `&threads=` where its kind of engine has them and it does not say;
    `auto` adds nothing.
    """
    head, _, given = spec.partition("?")
    known = {"hf": ("device", "threads"), "gguf": ("threads",)}.get(head.partition(":")[0], ())
    written = {option.partition("=")[0] for option in given.split("&")}
    added = [
        f"{name}={value}"
        for name, value in (("device", device), ("threads", threads))
        if name in known and name not in written and value != "auto"
    ]
    return f"{head}?{'&'.join(filter(None, [given, *added]))}" if added else spec


_KIND = re.compile(r"[A-Za-z][\w+.-]*:")


def require_local(spec: str, path: str, *, finding_id: str = "fidelity.engine_load") -> None:
    """AssayError where `path` is written as one on this machine and nothing is there."""
    if path.startswith((".", "/")) and not Path(path).exists():
        raise AssayError(
            f"{spec}: there is no {path}",
            finding_id=finding_id,
            remedy="check the path; a relative one starts from the folder you are in",
        )


def read_options(
    spec: str,
    prefix: str,
    known: Sequence[str],
    *,
    example: str,
    what: str = "model",
    shown: str = "",
) -> tuple[str, Options]:
    """What stands between `prefix` and the question mark, and the options after it.

    UsageError where nothing stands there, where a question mark ends the spec, and where an option
    is not `known`. `what` names the thing in the first of these, `example` is a spec to follow;
    `shown` stands for a spec that must not be printed as it is.
    """
    shown = shown or spec
    body, mark, query = spec.removeprefix(prefix).partition("?")
    pairs = tuple(parse_qsl(query, keep_blank_values=True))
    unknown = next((name for name, _ in pairs if name not in known), None)
    if not body:
        problem, remedy = f"names no {what}", f"write {example}"
    elif mark and not pairs:
        problem, remedy = "ends in a '?' without options", f"write {example}"
    elif unknown is not None:
        problem, remedy = f"has the unknown option {unknown!r}", f"options are {', '.join(known)}"
    else:
        # No shell expands a ~ that stands after a colon.
        return str(Path(body).expanduser()) if body.startswith("~") else body, pairs
    raise UsageError(f"{shown!r} {problem}", remedy=remedy, finding_id="fidelity.usage")
