"""Compares operators whose extents fit no tile with their neighbours that do (`make bench-odd`)."""
