"""The laboratory: research on top of the core. Nothing outside `lab` and `cli` imports it."""
