"""Codecs and wrappers by the name they have in a SPEC; each is imported when it is first asked for."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module

from assay.errors import UsageError
from assay.kv.codec import Codec
from assay.kv.wrapper import Placement, Wrapper

CODECS = {
    "identity": "identity:Identity",
    "bf16": "bf16:Bf16",
    "fp8": "fp8:Fp8",
    "int": "int_groups:IntGroups",
    "hadamard": "hadamard:Hadamard",
    "lattice": "lattice:Lattice",
    "kakeya": "kakeya:Kakeya",
    "pca": "pca:Pca",
    "noise": "noise:Noise",
}
WRAPPERS = {
    "prerope": "placement:PreRope",
    "sinks": "placement:Sinks",
    "recent": "placement:Recent",
    "boundary": "placement:Boundary",
    "mean": "mean:Mean",
    "qprecond": "qprecond:QPrecond",
    "outliers": "outliers:Outliers",
}


def codec_type(name: str) -> type[Codec]:
    """The codec of that name; UsageError with the nearest name where there is none."""
    return _load(name, CODECS, "codec")


def wrapper_type(name: str) -> type[Wrapper | Placement]:
    """The wrapper of that name; UsageError with the nearest name where there is none."""
    return _load(name, WRAPPERS, "wrapper")


def did_you_mean(word: str, known: list[str]) -> str:
    """What to do about an unknown word."""
    near = get_close_matches(word, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"


def _load(name: str, known: dict[str, str], kind: str) -> type:
    if name not in known:
        other = {"codec": WRAPPERS, "wrapper": CODECS}[kind]
        if name in other and kind == "wrapper":
            remedy = "a codec stands last, wrappers stand before it: sinks(n=4)+hadamard(bits=4)"
        elif name in other:
            remedy = f"put a codec after it: {name}+hadamard(bits=4)"
        else:
            remedy = did_you_mean(name, list(known))
        raise UsageError(f"unknown {kind} {name!r} in a SPEC", remedy=remedy, finding_id="kv.spec")
    module, _, attribute = known[name].partition(":")
    found: type = getattr(import_module(f"assay.kv.codecs.{module}"), attribute)
    return found
