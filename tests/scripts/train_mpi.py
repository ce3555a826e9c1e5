"""A script that takes its rank from Open MPI."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29517")
dist.init_process_group(
    "gloo",
    rank=int(os.environ["OMPI_COMM_WORLD_RANK"]),
    world_size=int(os.environ["OMPI_COMM_WORLD_SIZE"]),
)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Linear(64, 2)))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for _step in range(int(os.environ.get("STEPS", "1000000"))):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
