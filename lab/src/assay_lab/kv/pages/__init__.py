"""Packed pages: a KV cache in vLLM whose pages hold codes, and the attention that reads them."""

import re

from assay.errors import AssayError

PAGES = "ASSAY_KV_PAGES"
"""Environment variable of a vLLM process: the calibration file whose tables its packed pages take.
"""
BLOCK = 64
"""Tokens of a page."""
CODEC = "pages"
"""The name in place of a SPEC: codes that a page of vLLM's cache holds, not a codec in exact
pages.
"""


def refuse_wrapped(codec: str) -> None:
    """AssayError for `pages` as a part of a SPEC."""
    if codec != CODEC and re.search(rf"\b{CODEC}\b", codec):
        raise AssayError(
            f"{codec}: {CODEC} takes no parameters and no wrappers, and is for keys and values"
            " alike",
            finding_id="kv.spec",
            remedy=f"write --codec {CODEC}",
        )
