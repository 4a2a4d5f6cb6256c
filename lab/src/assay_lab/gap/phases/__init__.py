"""The phases of a decomposition, one a file."""
