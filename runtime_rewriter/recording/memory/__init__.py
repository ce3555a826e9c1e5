"""Records what one replica holds in memory during a training step."""
