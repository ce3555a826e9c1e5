"""Times the links between ranks, for `autotune probe` and before a job's first trial."""
