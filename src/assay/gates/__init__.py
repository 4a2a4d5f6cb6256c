"""Promises of a deployment: a contract (`assay.toml`), the gate that holds a deployment to it, and
what is published.

`contract` reads the file and names the numbers of a report that it may limit, `gate` runs every
section and judges the whole, `card` writes a model card, Hub results and a badge, `pytest_plugin`
runs a gate as a test.
"""
