"""`assay verify`: whether the files of a checkpoint are the right ones, whole, and fit to serve."""
