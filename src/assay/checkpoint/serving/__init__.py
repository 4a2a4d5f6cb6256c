"""The `vllm serve` command line against the checkpoint: what an engine accepts, overrides, rejects or gets wrong."""
