"""The detectors, one kind of degenerate text a file: `detect(view) -> Detection | None`."""
