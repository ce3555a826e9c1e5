"""Benchmark of sets of ops as one kernel, and a program with many of them."""
