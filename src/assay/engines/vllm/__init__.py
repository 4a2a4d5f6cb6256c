"""vLLM as a scoring engine: in this process where it can be imported, else in a worker with a
Python that has it.

`scorer.VllmScorer` is the engine, and the worker where vLLM is in another Python; `core` runs it;
`hooks` and `forcing` go into vLLM; `ranks` runs in each of its ranks and keeps account of what was
computed; `start` reads how it is written.
"""
