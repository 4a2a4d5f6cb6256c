"""Values that are not what their keys take, in every document."""

from __future__ import annotations

from collections.abc import Iterator

from assay.checkpoint.documents import INDEX, TABLES
from assay.checkpoint.findings import SHOWN, found, plural, warned
from assay.checkpoint.subject import Checkpoint
from assay.verdict import Finding


def check_documents(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Values that are not what their keys take, in every document that the rules read."""
    for name in TABLES:
        nonsense = checkpoint.nonsense(name)
        for entry in nonsense[:SHOWN]:
            area = "tokenizer_conflict" if name.startswith("tokenizer") else "config_conflict"
            if "quant" in name or entry.path.startswith(
                ("quantization_config", "compression_config", "text_config.quant")
            ):
                area = "quantization_conflict"
            write = found if entry.serious else warned
            detail = (
                ""
                if entry.serious
                else "Engines read it too, or pass it on; whether they stop differs."
            )
            yield write(
                "index_mismatch" if name == INDEX else area,
                f"{name} {entry.text}",
                detail=detail,
                key=entry.path,
                value=repr(entry.value)[:80],
                remedies=[f"take {name} from the original repository"],
            )
        if len(nonsense) > SHOWN:
            more = plural(len(nonsense) - SHOWN, "more value")
            yield found("config_conflict", f"{name} has {more} that are not what their keys take")
