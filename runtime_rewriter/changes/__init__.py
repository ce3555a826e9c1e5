"""Enacts what-ifs on an unmodified script, and measures them in turns with the baseline."""
