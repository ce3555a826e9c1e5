"""Ranks of TensorFlow inside the hosts of a testbed, with emulated accelerators."""
