"""Which engine an `hf:`, `vllm:`, `gguf:` or `http:` on the command line opens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

from assay.engines import require_local
from assay.engines.scoring import ScoringEngine, ScoringPath
from assay.engines.server.candidate import ServerCandidate
from assay.engines.server.endpoint import without_credentials
from assay.errors import AssayError, UsageError
from assay.plugins import get, names


def require_packages(what: str) -> None:
    """Raise AssayError where torch or transformers is not installed; imports neither. `what` needs
    them.
    """
    for name in ("torch", "transformers"):
        if find_spec(name) is None:
            raise AssayError(
                f"{what} needs {name}, which is not installed",
                finding_id="fidelity.engine_missing",
                remedy="pip install 'llm-assay[hf]'",
            )


# prefix: `module:class` with a `load(spec)`.
SCORERS = {
    "hf:": "assay.engines.hf.scorer:HfScorer",
    "vllm:": "assay.engines.vllm.scorer:VllmScorer",
    "gguf:": "assay.engines.gguf.scorer:GgufScorer",
}


# prefix: `module:function` that reads such a spec without loading anything.
_SPECS = {
    "hf:": "assay.engines.hf.spec:parse_hf",
    "vllm:": "assay.engines.vllm.spec:parse_vllm",
    "gguf:": "assay.engines.gguf.spec:parse_gguf",
}


def added_engine(spec: str) -> Any:
    """The engine of another package that a spec `NAME:…` names, None where there is none."""
    name, colon, _ = spec.partition(":")
    return get("assay.engines", name) if colon and f"{name}:" not in SCORERS else None


def check_spec(spec: str, path: ScoringPath | None = None) -> None:
    """UsageError or AssayError for a spec that no engine could open: a typing error should not cost
    a scored reference.

    With `path` also for an option that changes nothing on that scoring path.
    """
    for prefix, target in _SPECS.items():
        if spec.startswith(prefix):
            module, _, name = target.partition(":")
            parsed = getattr(import_module(module), name)(spec)
            require_local(spec, parsed.model)
            if getattr(parsed, "weights", ""):
                import_module("assay.engines.transform").parse_transform(parsed.weights)
            if prefix == "hf:":
                try:
                    parsed.refuse_what_is_not_there()
                except OSError as error:  # a name that no file can have
                    raise UsageError(
                        f"{spec[:80]!r} names no model that can be read: {error.strerror}",
                        remedy="check the path",
                        finding_id="fidelity.usage",
                    ) from error
                if path:
                    parsed.refuse_path(path)
            return
    if spec.startswith(("run:", "pack:")):
        raise UsageError(
            f"{spec} is a stored reference, which has no model to score a candidate with",
            remedy=f"name it first: assay compare {spec} CANDIDATE…",
            finding_id="fidelity.usage",
        )
    if not is_server(spec) and added_engine(spec) is None:
        raise _unknown(spec)


_OPENERS: list[Callable[[str], ScoringEngine]] = []


@contextmanager
def opened_by(opener: Callable[[str], ScoringEngine]) -> Iterator[None]:
    """Have `opener` open the engines that are asked for inside."""
    _OPENERS.append(opener)
    try:
        yield
    finally:
        _OPENERS.pop()


def open_scorer(spec: str) -> ScoringEngine:
    """The scoring engine that `spec` names; UsageError for an unknown kind."""
    if _OPENERS and not is_server(spec):
        return _OPENERS[-1](spec)
    for prefix, target in SCORERS.items():
        if spec.startswith(prefix):
            if prefix == "hf:":
                require_packages(spec.partition("?")[0])
            module, _, name = target.partition(":")
            engine: ScoringEngine = getattr(import_module(module), name).load(spec)
            return engine
    if added := added_engine(spec):
        return cast("ScoringEngine", added.load(spec))
    if is_server(spec):
        raise AssayError(
            f"{without_credentials(spec)} gives log-probabilities of a few ids, from which no"
            " distribution can be rebuilt",
            finding_id="fidelity.missing_capability",
            remedy=(
                "run the engine in process (hf:MODEL, vllm:MODEL, gguf:FILE); assay compare takes a"
                " server as candidate"
            ),
        )
    raise _unknown(spec)


def _unknown(spec: str) -> UsageError:
    return UsageError(
        f"{spec!r} names no engine that scores whole distributions",
        remedy="write "
        + ", ".join(
            ("hf:MODEL", "vllm:MODEL", "gguf:FILE", *(f"{n}:…" for n in names("assay.engines")))
        )
        + ", run:DIR or pack:FILE; a candidate may be http://…",
        finding_id="fidelity.usage",
    )


def is_server(spec: str) -> bool:
    """Whether `spec` names a server."""
    return spec.startswith(("http://", "https://"))


def open_candidate(spec: str) -> ScoringEngine | ServerCandidate:
    """The engine that `spec` names: a server, or one that `open_scorer` opens."""
    return ServerCandidate.load(spec) if is_server(spec) else open_scorer(spec)
