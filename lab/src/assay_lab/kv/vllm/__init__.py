"""Codecs inside a running vLLM, and captures of its cache."""
