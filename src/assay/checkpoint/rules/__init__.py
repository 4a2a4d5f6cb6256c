"""Rules on a checkpoint's small files: functions, each with a line in RULES or an entry point of another package."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from assay.checkpoint.rules.config import check_config, check_documents, check_generation, check_rope
from assay.checkpoint.rules.tokenizer import check_chat_template, check_end_of_text, check_tokenizer
from assay.checkpoint.subject import Checkpoint
from assay.plugins import load
from assay.verdict import Finding

Rule = Callable[[Checkpoint], Iterator[Finding]]

RULES: tuple[Rule, ...] = (
    check_documents,
    check_config,
    check_rope,
    check_generation,
    check_tokenizer,
    check_end_of_text,
    check_chat_template,
)


def all_rules() -> tuple[Rule, ...]:
    """Those of assay, then those of other packages."""
    return (*RULES, *load("assay.rules").values())


__all__ = ["RULES", "Rule", "all_rules"]
