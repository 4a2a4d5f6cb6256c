"""Whether a line names drafting and says how much was accepted."""

from __future__ import annotations

import re

from assay.speculation.clues import LONGEST

NAMED_DRAFTING = re.compile(
    r"draft|specul|spec[_ -]?dec|\bspec[ _-]|mtp|eagle|medusa|dflash|nextn|n-?gram|lookahead", re.I
)

_COUNTS = re.compile(
    r"acc(?:ept\w{0,20})?\b[^.;]{0,40}?(?:\d{1,15}\s?/\s?\d|\d[\d.]{0,15}\s?%|(?:[=:]|->|→)\s*\d)"
    r"|(?<!\d)(?:\d{1,15}\s?(?:/|of)\s?\d{1,15}|\d[\d.]{0,15}\s?%)[^.;]{0,30}\baccept",
    re.I,
)

_SETTING = re.compile(
    r"\b\w{0,60}?(?:threshold|sampler|alpha|method)\w{0,60}['\"]?\s?[=:]\s?\S+", re.I
)


def looks_like_drafting(text: str) -> bool:
    """Whether a line names drafting and says how much was accepted."""
    text = _SETTING.sub("", text[:LONGEST])
    return NAMED_DRAFTING.search(text) is not None and _COUNTS.search(text) is not None
