"""Records the memory of one replica during a training step."""
