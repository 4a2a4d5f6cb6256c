"""Draft heads: write text with the target, train a head on it, export it for vLLM, and measure what it accepts.

`text` writes what is trained on, `model` is the head, `train` the loop, `export` the files that an engine loads, and
`experiment` runs one head against many changed targets. A plain loop of torch was chosen over the package `speculators`
0.9: that needs torchvision, torchaudio and a running vLLM with `hs-connectors` of its own version to stream hidden states
from, while targets of this size give them in the same process, and its loop keeps no acceptance as an engine counts it.
"""
