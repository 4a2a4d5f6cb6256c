"""The codec `kakeya`, a published recipe, with and without its fault."""
