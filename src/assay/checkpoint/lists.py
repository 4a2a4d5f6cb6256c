"""Choose the tensor list for a checkpoint, and say what was not examined."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec

from assay.checkpoint.comparison import Comparison, compare_tensors
from assay.checkpoint.expectation import expectation
from assay.checkpoint.families import FAMILIES
from assay.checkpoint.findings import unexamined
from assay.checkpoint.meta_model import compare_with_transformers
from assay.checkpoint.patterns import check_patterns, check_towers
from assay.checkpoint.subject import Checkpoint
from assay.verdict import Finding, Severity

_TEXT = re.compile(
    r"(^|\.)(language_model|lm_head|text_model)\.|^model\.(layers|embed_tokens|norm)\."
)
_INSTALL = "install it: pip install 'llm-assay[hf]'"


def choose_list(checkpoint: Checkpoint, draft: tuple[str, ...]) -> Comparison:
    """Compare with the config's own list where assay knows the family by heart, else with
    transformers' model. Towers beside a language model come from transformers in both cases.
    """
    own = expectation(checkpoint)
    if own is None:
        return _by_transformers(checkpoint, draft)
    text = compare_tensors(checkpoint, own)
    if not has_towers(checkpoint) or text.problem:
        return text
    whole = _by_transformers(checkpoint, draft)
    missing = tuple(name for name in whole.missing if not _TEXT.search(name))
    wrong = {name: shapes for name, shapes in whole.wrong.items() if not _TEXT.search(name)}
    return Comparison(
        text.origin, text.missing + missing, {**text.wrong, **wrong}, towers=whole.problem
    )


def has_towers(checkpoint: Checkpoint) -> bool:
    """Whether the config describes a vision or audio tower that the architecture loads."""
    config = checkpoint.config
    names = config.get("architectures") or ()
    described = any(
        isinstance(value, dict) and value and re.search(r"vision|audio|visual|image|speech", key)
        for key, value in config.items()
    )
    return described and not all(name.endswith("ForCausalLM") for name in names)


def _by_transformers(checkpoint: Checkpoint, draft: tuple[str, ...]) -> Comparison:
    if not (find_spec("torch") and find_spec("transformers")):
        return Comparison("transformers", problem="transformers is not installed")
    return compare_with_transformers(checkpoint, draft)


def check_unlisted(checkpoint: Checkpoint, compared: Comparison) -> Iterator[Finding]:
    """What was not compared with a list, and what patterns over names tell of it."""
    if compared.problem:
        yield _not_compared(checkpoint, compared)
        yield from check_patterns(checkpoint)
    if compared.problem or compared.towers:
        yield from check_towers(checkpoint)
    if compared.towers:
        title = f"the vision or audio tower was examined by patterns alone: {compared.towers}"
        yield unexamined(title, part="towers")


def _not_compared(checkpoint: Checkpoint, compared: Comparison) -> Finding:
    kind = checkpoint.config.get("model_type") or "this architecture"
    known = checkpoint.model_type in FAMILIES
    title = (
        f"{compared.problem}: the names and shapes of the tensors were not examined"
        if known
        else f"the tensors of {kind} were examined by patterns alone: {compared.problem}"
    )
    remedies = ["take config.json from the original repository"] if known else []
    if "not installed" in compared.problem:
        remedies = [_INSTALL]
    return unexamined(
        title, severity=Severity.WARNING, remedies=remedies, decisive=not known, part="tensors"
    )
