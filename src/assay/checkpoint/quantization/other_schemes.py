"""bitsandbytes, torchao, HQQ, Quark, and the formats that assay recognises without opening them."""

from __future__ import annotations

from assay.checkpoint.quantization.declared import Declared, Found, strings
from assay.checkpoint.quantization.stored import Kind

_PLAIN = frozenset({Kind.PLAIN})


def bitsandbytes(found: Found) -> Declared:
    """bitsandbytes: every Linear but `llm_int8_skip_modules` (the output head by default), 4 or 8 bits."""
    raw = found.raw
    four = bool(raw.get("load_in_4bit") or raw.get("_load_in_4bit"))
    skipped = strings(raw.get("llm_int8_skip_modules"))

    def accepts(module: str) -> frozenset[Kind] | None:
        if module.endswith("lm_head"):
            return None
        if any(part in module.split(".") or module.startswith(part) for part in skipped):
            return _PLAIN
        return frozenset({Kind.BNB4 if four else Kind.BNB8})

    return Declared("bitsandbytes", found.source, raw, accepts, bits=4 if four else 8)


def torchao(found: Found) -> Declared:
    """torchao: tensors of its own, flattened into parts; which modules depends on a nested recipe."""

    def accepts(module: str) -> frozenset[Kind] | None:
        if module.endswith("lm_head") or module in strings(found.raw.get("modules_to_not_convert")):
            return None
        return frozenset({Kind.TORCHAO})

    return Declared("torchao", found.source, found.raw, accepts)


def hqq(found: Found) -> Declared:
    """HQQ: W_q with its metadata beside it, but for `skip_modules`."""
    skipped = strings(found.raw.get("skip_modules"))

    def accepts(module: str) -> frozenset[Kind] | None:
        if any(part in module.split(".") for part in skipped):
            return _PLAIN
        return frozenset({Kind.HQQ})

    return Declared("hqq", found.source, found.raw, accepts)


def unopened(found: Found) -> Declared:
    """A method that assay knows by name only: nothing is said about single modules."""
    return Declared(found.method, found.source, found.raw, lambda module: None)
