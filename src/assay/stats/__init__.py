"""Intervals and errors, without torch."""
