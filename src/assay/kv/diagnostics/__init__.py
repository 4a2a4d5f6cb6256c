"""What a codec does to keys and values, seen from inside: errors by head and stage, and what attention makes of them."""
