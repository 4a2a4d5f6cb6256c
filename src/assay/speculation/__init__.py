"""Does drafting pay? Reads what an engine leaves behind, normalises it, and judges the draft head."""
