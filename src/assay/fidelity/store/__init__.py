"""A stored reference: final hidden states and the output head, window by window, in a folder."""
