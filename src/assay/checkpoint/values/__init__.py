"""The optional scan of every stored value, streamed at memory speed."""
