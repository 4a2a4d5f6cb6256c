"""Open an engine from the way it is written on the command line."""

from __future__ import annotations

from importlib import import_module

from assay.engines.scoring import ScoringEngine
from assay.errors import AssayError, UsageError

# prefix: `module:class` with a `load(spec)`.
SCORERS = {
    "hf:": "assay.engines.hf.scorer:HfScorer",
    "vllm:": "assay.engines.vllm:VllmScorer",
    "gguf:": "assay.engines.gguf:GgufScorer",
}


def open_scorer(spec: str) -> ScoringEngine:
    """The scoring engine that `spec` names; UsageError for an unknown kind."""
    for prefix, target in SCORERS.items():
        if spec.startswith(prefix):
            module, _, name = target.partition(":")
            engine: ScoringEngine = getattr(import_module(module), name).load(spec)
            return engine
    if spec.startswith(("http://", "https://")):
        raise AssayError(
            f"{spec} gives log-probabilities of a few tokens at most, a comparison needs whole distributions",
            finding_id="fidelity.missing_capability",
            remedy="run the engine in process (vllm:MODEL with the server's options), or check the server: assay check URL",
        )
    raise UsageError(
        f"{spec!r} names no engine that scores whole distributions",
        remedy="write hf:MODEL, vllm:MODEL, gguf:FILE or run:DIR",
        finding_id="fidelity.usage",
    )
