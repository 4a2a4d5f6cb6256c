"""assay: prove that a fast LLM is still the same model."""

__version__ = "0.2.0"
