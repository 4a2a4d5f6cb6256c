"""KV-cache codecs: real streams, real bytes, and scores that read the cache.

A SPEC (`spec`) names `codecs`; `layer_coders` fits them to every layer, `stream_coder` runs them,
`cache_hook`, `resident` and `vllm` put them into a model. `evaluator` measures for `eval`, `sweep`,
`sensitivity` and `diagnose`. `blocks`, `rans` and `tier` keep blocks that leave the engine.
"""
