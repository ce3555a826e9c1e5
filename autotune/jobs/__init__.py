"""The application layer: carries a tuning job out on a world of ranks."""
