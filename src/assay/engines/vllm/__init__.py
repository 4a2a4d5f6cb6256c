"""vLLM as a scoring engine: in this process where it can be imported, else in a worker with a Python that has it.

`scorer.VllmScorer` is the engine; `core` runs it where vLLM is, `worker` where it is not; `hooks` and `forcing` go into vLLM, `steps`
keeps account of what it computed, `start` reads how it is written.
"""
