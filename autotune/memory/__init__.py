"""The memory of a replica: its peak, what a plan adds, and the passes that fit it into a budget."""
