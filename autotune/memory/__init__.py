"""The memory of a replica: its peak, the buffers of a plan, and passes that fit a budget."""
