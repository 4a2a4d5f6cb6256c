"""What launches servers: `assay doctor` finds the setting that breaks a serve command; bundles
carry its evidence.

`command` reads a serve command, `launch` starts it (`ray_starts` on a cluster), `symptoms` are what
one start shows, `search` decides what to start next, `doctor` is the whole, and `run` has its
report.
"""
