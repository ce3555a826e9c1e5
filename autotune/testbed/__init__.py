"""Emulated clusters on one Linux machine, with namespaces as hosts and shaped links."""
