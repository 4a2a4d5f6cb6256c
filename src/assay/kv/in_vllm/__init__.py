"""KV codecs inside vLLM: what `assay.kv.hook` is for transformers."""
