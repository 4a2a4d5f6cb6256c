"""The rules of a check, one kind of evidence a file."""
