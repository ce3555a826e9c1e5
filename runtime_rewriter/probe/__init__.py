"""Times the links of a running group of ranks: `autotune probe`, and the short probe before a job's first trial."""
