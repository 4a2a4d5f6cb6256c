"""Maths of quantisation that weights and KV codecs share: rotations, tables, packing, trellises."""
