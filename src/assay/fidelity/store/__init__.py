"""Stored references: final states of every scored token and the output head once, from which logits are rebuilt.

    DIR/manifest.json           what was stored, and the SHA-256 of every file; written last after each window
    DIR/head/SHA.safetensors    `weight` [V, d] and `bias` [V]
    DIR/states/SHA.safetensors  `states` [n, d] of one window and its `tokens` [L]
    DIR/tokens/SHA.safetensors  `tokens` [windows, L] of all windows, written when the store is finished

A file is named after its own hash and checked whenever it is read. An interrupted run keeps every window that is
whole. llama.cpp's file of log-probabilities is in `llama_base`.
"""

from assay.fidelity.store.manifest import StoreHeader, StoreSize
from assay.fidelity.store.reader import Store, open_store
from assay.fidelity.store.writer import StoreWriter

__all__ = ["Store", "StoreHeader", "StoreSize", "StoreWriter", "open_store"]
