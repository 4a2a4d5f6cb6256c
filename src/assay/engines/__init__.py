"""Engines: what runs a language model, one module or package each, behind the protocol in `base`."""
