"""A reference in one file, which a stranger can check and compare against: `pack:FILE`."""
