"""Trains with the groups of an exported strategy: `horovod_groups.py FOLDER TIMELINE STEPS`."""

import sys

sys.path.insert(0, sys.argv[1])

import best_horovod  # type: ignore[import-not-found]
import horovod.torch as hvd
import torch

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(0)
inner = (torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
model = torch.nn.Sequential(*inner, torch.nn.Linear(64, 8))
optimizer = best_horovod.distributed(torch.optim.SGD(model.parameters(), lr=0.01), model)
hvd.start_timeline(sys.argv[2])
for _step in range(int(sys.argv[3])):
    optimizer.zero_grad()
    model(torch.randn(4, 32)).square().mean().backward()
    optimizer.step()
hvd.stop_timeline()
hvd.shutdown()
