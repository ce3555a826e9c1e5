"""What happens inside a PyTorch training process: the plan in place of DDP's synchronization,
profiles, emulation."""
