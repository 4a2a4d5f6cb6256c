"""llama.cpp in this process (the package llama-cpp-python): logits over the whole vocabulary, by any scoring path."""

from assay.engines.gguf.scorer import GgufScorer

__all__ = ["GgufScorer"]
