"""Packed pages: a KV cache in vLLM whose pages hold codes, and the attention that reads them."""

PAGES = "ASSAY_KV_PAGES"
"""Environment variable of a vLLM process: the calibration file whose tables its packed pages take."""
BLOCK = 64
"""Tokens of a page."""
CODEC = "pages"
"""What stands in the place of a SPEC: codes that a page of vLLM's cache holds, not a codec in exact pages."""
