"""`assay watch`: a light canary for a serving process.

`canary` asks one round of probes, `change` decides whether they still come from the same model,
`watch` runs the loop, keeps its state, and shows it to Prometheus, to health checks and to a
webhook.
"""
