"""The stages of `assay verify`: each reads one aspect of the checkpoint and adds what it finds to the outcome."""
