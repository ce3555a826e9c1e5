"""What tuning is worth beside every rival: `python -m benchmarks.outcome`."""
