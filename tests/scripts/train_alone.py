"""Scripts whose gradients nobody can plan: `unwrapped` or `sharded`; or that die at once."""

import sys

import torch
import torch.distributed as dist

if sys.argv[1] == "missing":
    import missing_module  # type: ignore[import-not-found] # noqa: F401

if sys.argv[1] == "cuda":
    torch.nn.Linear(8, 8).cuda()

dist.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
if sys.argv[1] == "sharded":
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for _step in range(10**9):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
