"""vLLM as a scoring engine: in this process where it can be imported, else in a worker with a
Python that has it.

`scorer.VllmScorer` is the engine; `remote` and `wire` are the two ends of the pipe to a worker;
`core` runs vLLM; `worker` runs in each of its ranks, and `ledger` keeps account of what was
computed there; `hooks` and `forcing` go into vLLM; `spec` reads how it is written.
"""
