"""How an engine in this process is written: `hf:PATH?dtype=float32&device=cpu`."""

from __future__ import annotations

from dataclasses import dataclass, fields

from assay.engines.options import read_options
from assay.errors import UsageError

DTYPES = ("auto", "bfloat16", "float16", "float32")
"""Accepted values of `dtype`; `auto` is the type in which the checkpoint is stored."""


@dataclass(frozen=True)
class HfSpec:
    """One model for transformers: a folder (or a name on the hub) and how to load it."""

    model: str
    dtype: str = "auto"
    device: str = "cpu"
    attention: str = ""
    """`eager`, `sdpa`, …; empty: assay's own, the same as `sdpa` but for one new token."""
    weights: str = ""
    """A transformation of the weights after loading, such as `polar(bits=4)`; empty: as stored."""


def parse_spec(spec: str) -> HfSpec:
    """Read `hf:MODEL?option=value&…`, or a plain MODEL; UsageError on an unknown option or value."""
    options: dict[str, str] = {field.name: str(field.default) for field in fields(HfSpec)[1:]}
    # A model of transformers is also the reference of `assay check`, whose errors these are then.
    model, given = read_options(
        spec,
        "hf:",
        list(options),
        example="hf:PATH, such as hf:./model?dtype=float32",
        finding_id="server.usage",
    )
    options |= dict(given)
    if options["dtype"] not in DTYPES:
        raise UsageError(
            f"{spec!r}: unknown dtype {options['dtype']!r}", remedy=f"one of {', '.join(DTYPES)}"
        )
    return HfSpec(model=model, **options)
