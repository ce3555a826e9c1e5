"""Emulated clusters on one Linux machine: namespaces as hosts, links with stated rates and latencies."""
