"""Measures the gain of tuning over every rival: `python -m benchmarks.outcome`."""
