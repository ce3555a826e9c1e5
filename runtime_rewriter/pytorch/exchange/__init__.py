"""How the messages of a plan are enacted with torch.distributed."""
