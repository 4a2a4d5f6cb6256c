"""GGUF files: their header, what it says of the model, and their values."""
