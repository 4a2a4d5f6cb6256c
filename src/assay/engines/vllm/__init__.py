"""vLLM as a scoring engine: in this process where it can be imported, else in a worker with a Python that has it."""

from assay.engines.vllm.scorer import VllmScorer

__all__ = ["VllmScorer"]
