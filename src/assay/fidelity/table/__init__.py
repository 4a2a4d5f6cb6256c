"""Many comparisons as one table: rows of windows, sums of rows, and the verb."""
