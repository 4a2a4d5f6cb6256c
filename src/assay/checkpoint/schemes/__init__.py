"""Quantisation schemes: what each declares of a module's stored tensors."""
