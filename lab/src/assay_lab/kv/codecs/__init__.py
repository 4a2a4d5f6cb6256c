"""KV codecs and the wrappers around them, one a file; `assay_lab.kv.spec` names them."""

from assay_lab.kv.codecs.base import BlockCoder, Codec, Stage
from assay_lab.kv.codecs.fields import Field
from assay_lab.kv.codecs.placement import Placement, Wrapper
from assay_lab.kv.codecs.samples import LayerStream, Samples

__all__ = [
    "BlockCoder",
    "Codec",
    "Field",
    "LayerStream",
    "Placement",
    "Samples",
    "Stage",
    "Wrapper",
]
