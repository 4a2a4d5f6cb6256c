"""How long the Hub is waited for. Used as `limits.NAME`, so that a test can be quicker."""

REQUEST_S = 10.0
"""Seconds that one request may wait for the next bytes."""
BUDGET_S = 60.0
"""Seconds that all requests of one question may take together."""
PATIENCE_S = 10.0
"""A server that asks to wait longer than this is taken at its word: not now."""
TRIES = 3
"""How often one thing is asked for."""
PAUSE_S = 0.5
"""Seconds before the second try; doubled for the third."""
