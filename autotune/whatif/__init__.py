"""What if? Predicts the step time under changes that nobody has implemented (Daydream)."""
