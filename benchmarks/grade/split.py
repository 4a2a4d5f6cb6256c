"""One split of all texts into a half to tune on and a half to report on, by source."""

from __future__ import annotations

import hashlib


def is_tune(source: str) -> bool:
    """Whether a source belongs to the tune half. All chunks of a source, and all samples of a
    model, stay together.
    """
    return hashlib.sha256(f"assay/{source}".encode()).digest()[0] % 2 == 0


def is_table(source: str) -> bool:
    """Whether a source of the tune half serves to count the language tables; the others of that
    half serve to fit the trees, which would else trust the tables more on the texts that these were
    counted on."""
    return is_tune(source) and hashlib.sha256(f"assay/{source}".encode()).digest()[1] % 2 == 0
