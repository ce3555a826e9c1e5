"""Readers of the files that profilers write, one trace or profile at a time."""
