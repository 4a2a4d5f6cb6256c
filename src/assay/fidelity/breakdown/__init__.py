"""Where a difference occurs within a text, and what difference would be there anyway."""
