"""All rules on the documents of a checkpoint.

A rule is a function with a line in RULES, or an entry point of another package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from assay.checkpoint.rules.chat_template import check_chat_template
from assay.checkpoint.rules.config import check_config
from assay.checkpoint.rules.documents import check_documents
from assay.checkpoint.rules.end_of_text import check_end_of_text
from assay.checkpoint.rules.generation import check_generation
from assay.checkpoint.rules.rope import check_rope
from assay.checkpoint.rules.tokenizer import check_tokenizer
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
