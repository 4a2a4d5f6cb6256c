"""The text that is scored: where it comes from, and whether both sides cut it into the same ids."""
