"""Maths of quantisation that weights and KV codecs share: rotations, tables, packing. No other part of assay."""
