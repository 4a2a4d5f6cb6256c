"""GGUF files: the header, the tensor table, and rules on them."""
