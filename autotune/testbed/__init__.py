"""Emulated clusters on one Linux machine: namespaces as hosts, with links of the rate and latency that a cluster file states."""
