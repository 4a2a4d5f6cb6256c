"""The laboratory of assay: KV codecs, gaps between engines, draft heads. The core never imports it.

`codec(SPEC).attached(model)` puts a KV codec into a plain model of transformers. `quantisation` and
`trellis` are the maths that weights and KV codecs share; `kv`, `heads` and `gap` have the commands,
and `options` what each is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command line reads its options from here, without torch
    from pathlib import Path

    from assay_lab.kv.attached import AttachableCodec

__all__ = ["PLUGIN_GROUPS", "codec"]

PLUGIN_GROUPS = {"assay.codecs": "subclass of assay_lab.kv.codecs.Codec"}
"""What an entry point of each group names that the laboratory reads, beside
`assay.plugins.GROUPS`.
"""


def codec(spec: str, *, calibration: str | Path | None = None) -> AttachableCodec:
    """The codec of a SPEC such as `hadamard(bits=4)`.

    Args:
        spec: A codec and its wrappers, as `assay kv eval --codec` takes it.
        calibration: A file of `assay kv calibrate`, for codecs that learn from one.

    Returns:
        The codec, which `attached(model)` puts into a model.

    Raises:
        UsageError: The SPEC is wrong.
        AssayError: The codec learns from a calibration and none is given.
    """
    from assay_lab.kv.attached import AttachableCodec

    return AttachableCodec.of(spec, calibration)
