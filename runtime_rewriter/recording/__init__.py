"""Records the training steps of a process: every op, every collective, and what lies between."""
