"""Closed forms of a plan's costs: messages, sparse rows, and when gradients are ready."""
