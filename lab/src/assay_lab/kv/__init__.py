"""KV-cache codecs: real streams, real bytes, and scores that read the cache.

A SPEC (`spec`) names `codecs`; `fit` makes coders of it, `stream_coder` has them at work,
`cache_hook`, `resident` and `vllm` put them into a model. `lab` measures for `evaluate`,
`sensitivity` and `diagnose`. `blocks`, `rans` and `tier` keep blocks that leave the engine.
"""
