"""What one rank hears: the launcher, the tuning session, `autotune.apply`."""
