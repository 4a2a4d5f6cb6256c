"""The laboratory: research on top of the core. Nothing outside `lab` and `cli` imports it.

`codec(SPEC).attached(model)` puts a KV codec into a plain model of transformers. `quantisation` and `trellis` are the maths
that weights and KV codecs share; `kv`, `heads` and `gap` have the commands, and `options` what each is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command line reads its options from here, without torch
    from pathlib import Path

    from assay.lab.kv.resident import AttachableCodec


def codec(spec: str, *, calibration: str | Path | None = None) -> AttachableCodec:
    """The codec of a SPEC such as `hadamard(bits=4)`; `calibration`: a file of `assay kv calibrate`.

    UsageError for a wrong SPEC, AssayError where it learns from a calibration and none is given.
    """
    from assay.lab.kv.resident import AttachableCodec

    return AttachableCodec.of(spec, calibration)
