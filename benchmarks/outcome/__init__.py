"""What tuning is worth against every rival: `python -m benchmarks.outcome`."""
