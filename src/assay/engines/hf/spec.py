"""`hf:MODEL?…`: a model that transformers runs, as it is written on the command line."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from assay.engines import read_options
from assay.engines.scoring import ScoringPath
from assay.errors import AssayError, UsageError

DTYPES = ("auto", "bfloat16", "float16", "float32")
"""Accepted values of `dtype`; `auto` is the type in which the checkpoint is stored."""


KV_CACHE_DTYPES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2")
"""Accepted values of `kv_cache_dtype`, by vLLM's names; `auto` is the type of the model, `fp8` is
`fp8_e4m3`.
"""


_CONFIGS = ("config.json", "adapter_config.json")


@dataclass(frozen=True)
class HfSpec:
    """One model for transformers: a folder (or a name on the hub) and how to load it."""

    model: str
    dtype: str = "auto"
    device: str = "auto"
    """`auto` is the GPU where torch finds one, else the CPU."""
    attention: str = "sdpa"
    """`sdpa`, `eager`, … of transformers; `assay` is its own product for one new token (see
    `hf.cache`).
    """
    weights: str = ""
    """A transformation of the weights after loading, such as `polar(bits=4)`; empty: as stored."""
    kv_cache_dtype: str = "auto"
    """What the KV cache holds its keys and values in."""
    threads: int = 0
    """Threads of torch; 0: as many as there are free cores."""

    def refuse_path(self, path: ScoringPath) -> None:
        """AssayError where the scoring path does not read what `kv_cache_dtype` changes."""
        if path is ScoringPath.PREFILL and self.unread:
            raise AssayError(
                f"hf:{self.model}?kv_cache_dtype={self.kv_cache_dtype}: {self.unread}",
                finding_id="fidelity.missing_capability",
                remedy=(
                    "score by --path decode or chunked (assay kv: --mode decode; assay gap: --mode"
                    " decode --base-mode decode), or leave it out"
                ),
            )

    def refuse_what_is_not_there(self) -> None:
        """AssayError where a local model is no checkpoint, or torch knows no such device here;
        loads nothing.
        """
        path = Path(self.model)
        if path.is_file():
            problem = "it is a file"
        elif path.is_dir() and not any((path / name).is_file() for name in _CONFIGS):
            problem = "the folder holds no config.json"
        else:
            self._require_device()
            return
        raise AssayError(
            f"hf:{self.model} is no checkpoint: {problem}",
            finding_id="fidelity.engine_load",
            remedy="give the folder of a checkpoint that transformers can load: hf:PATH",
        )

    def _require_device(self) -> None:
        if self.device in ("auto", "cpu"):
            return
        import torch

        try:
            kind = torch.device(self.device).type
            problem = (
                "" if kind != "cuda" or torch.cuda.is_available() else "torch finds no GPU here"
            )
        except RuntimeError as error:
            problem = str(error).strip().partition("\n")[0]
        if problem:
            raise AssayError(
                f"hf:{self.model}: no device {self.device!r}: {problem}",
                finding_id="fidelity.engine_load",
                remedy="name a device that is there: ?device=cpu",
            )

    @property
    def unread(self) -> str:
        """Why the prefill path is no path for a cache of another type; empty for `auto`."""
        if self.kv_cache_dtype == "auto":
            return ""
        return (
            f"kv_cache_dtype={self.kv_cache_dtype} changes what is read from a KV cache, and the"
            " prefill path reads none"
        )


def parse_hf(spec: str) -> HfSpec:
    """Read `hf:MODEL?option=value&…`, or a plain MODEL; UsageError on an unknown option
    or value.
    """
    options: dict[str, Any] = {field.name: field.default for field in fields(HfSpec)[1:]}
    model, given = read_options(
        spec, "hf:", list(options), example="hf:PATH, such as hf:./model?dtype=float32"
    )
    options |= dict(given)
    for name, known in (("dtype", DTYPES), ("kv_cache_dtype", KV_CACHE_DTYPES)):
        if options[name] not in known:
            raise UsageError(
                f"{spec!r}: unknown {name} {options[name]!r}",
                remedy=f"one of {', '.join(known)}",
                finding_id="fidelity.usage",
            )
    if options["kv_cache_dtype"] == "fp8":
        options["kv_cache_dtype"] = "fp8_e4m3"
    if options["threads"] == "auto":
        options["threads"] = 0
    if not str(options["threads"]).isdecimal():
        raise UsageError(
            f"{spec!r}: threads={options['threads']} is not a whole number",
            remedy="write a number, or auto",
            finding_id="fidelity.usage",
        )
    options["threads"] = int(options["threads"])
    return HfSpec(model=model, **options)
