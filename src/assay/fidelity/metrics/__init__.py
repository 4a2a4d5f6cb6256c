"""How far one distribution is from another at every scored token of a window."""
