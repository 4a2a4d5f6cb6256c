"""Intervals and errors that the verdicts rest on."""
