"""The ranks' side of the runtime: the launcher, the tuning session, `autotune.apply`."""
