"""Draft heads: write text with the target, train a head on it, export it for vLLM, and measure what
it accepts.

`model` is the head, `train` writes what it is trained on and trains it, `export` has the files that
an engine loads, `pack` puts
them into one, and `experiment` runs one head against many changed targets. A plain loop of torch
was chosen over the package `speculators`
0.9.0: that asks for torchvision, torchaudio and more, and takes hidden states by `hs-connectors`
  from a vLLM server beside the
training, while targets of this size give them in the same process.
"""
