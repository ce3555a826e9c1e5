"""Inside a PyTorch training process: enacted plans, profiles and emulation."""
