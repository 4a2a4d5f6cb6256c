"""Packed pages in a process of vLLM: the entry `pages` of the group `assay.vllm_hooks`."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from assay_lab.kv.pages import BLOCK, PAGES


def prepare(calibration: str, model: str) -> dict[str, Any]:
    """Get this process ready to start vLLM with packed pages; AssayError where they do not fit the
    model.

    Returns the arguments of `vllm.LLM` that packed pages need.
    """
    import_module("assay_lab.kv.pages.source").source_of(calibration, model)
    os.environ[PAGES] = calibration
    import_module("assay_lab.kv.pages.backend").register()
    return {"attention_backend": "CUSTOM", "block_size": BLOCK}


def register() -> None:
    """Make the attention of packed pages known to vLLM, where the environment names a calibration
    for it.
    """
    if os.environ.get(PAGES):
        import_module("assay_lab.kv.pages.backend").register()
