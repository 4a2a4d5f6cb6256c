"""transformers in this process: the trusted side of a comparison."""

from assay.engines.hf.engine import HfEngine
from assay.engines.hf.spec import HfSpec, parse_spec

__all__ = ["HfEngine", "HfSpec", "parse_spec"]
