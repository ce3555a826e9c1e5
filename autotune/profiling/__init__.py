"""Reads traces, profiles and probes: what was recorded becomes graphs, clocks and fitted costs."""
