"""Records the training steps of a process: its ops, its collectives and its memory."""
