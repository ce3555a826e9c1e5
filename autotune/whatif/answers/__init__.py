"""What a user gets: predictions, their limits, curves, and the slowest rank."""
