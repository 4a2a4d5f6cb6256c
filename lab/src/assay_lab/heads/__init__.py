"""Draft heads: write text with the target, train a head on it, export it for vLLM, and measure what
it accepts.

`model` is the head, `text` writes its training text, `training` trains it, `export` writes the
files that an engine loads, `pack` puts them into one, and `experiment` runs one head beside many
changed targets. The training loop is plain torch: the package `speculators` 0.9.0 needs torchaudio,
torchvision and a vLLM server for hidden states; targets of this size give them in the same process.
"""
