"""Cost models fitted to probes of the links."""
