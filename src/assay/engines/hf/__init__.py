"""transformers in this process: the trusted side of a comparison.

`engine.HfEngine` loads a model, writes and scores text; `scorer.HfScorer` scores windows with it;
`cache` is its KV cache. `assay.engines.specs` reads how it is written, without torch.
"""

import os

# Threads that wait for each other then sleep instead of spinning, which beside another program
# costs them its whole share of a core. OpenMP reads it when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
