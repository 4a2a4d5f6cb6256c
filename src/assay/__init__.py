"""assay: prove that a fast LLM is still the same model."""

__version__ = "0.1.0"
