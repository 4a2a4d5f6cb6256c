"""The tier of the KV cache: stored blocks, which come back, and how they move."""
