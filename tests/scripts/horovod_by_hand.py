"""Enacts the export in FOLDER without a launcher of autotune: `horovod_by_hand.py FOLDER STEPS`.

First by its code for Horovod alone, then by `autotune.apply`, which restarts Horovod since the
variable of the code is gone. The script itself must not: Horovod's own rendezvous keeps addresses
of the first start, and on a busy machine aborts the second one. Each way writes a timeline, and
prints a digest of the parameters. Under the plan `hvd.join()` is refused.
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

sys.path.insert(0, sys.argv[1])

import best_horovod  # type: ignore[import-not-found]
import horovod.torch as hvd
import torch

import autotune
from autotune.errors import InvalidInput

FOLDER, STEPS = Path(sys.argv[1]), int(sys.argv[2])


def train(way: str, wrap: Callable[[Any, torch.nn.Module], Any]) -> None:
    torch.manual_seed(0)
    inner = (torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    model = torch.nn.Sequential(*inner, torch.nn.Linear(64, 8))
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.01), model)
    data = torch.Generator().manual_seed(hvd.rank())
    hvd.start_timeline(str(FOLDER / f"{way}.json"))
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(4, 32, generator=data)).square().mean().backward()
        optimizer.step()
    hvd.stop_timeline()
    values = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    print(way, sha256(values.numpy().tobytes()).hexdigest(), flush=True)


def by_autotune(optimizer: Any, model: torch.nn.Module) -> Any:
    named = model.named_parameters()
    wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=named, op=hvd.Sum)
    applied = autotune.apply(model, wrapped, FOLDER / "best.json")
    print("restarts", applied.synchronizer.restarts, *applied.notes, flush=True)
    return wrapped


torch.set_num_threads(1)
hvd.init()
train("groups", partial(best_horovod.distributed, op=hvd.Sum))
del os.environ["HOROVOD_DISABLE_GROUP_FUSION"]
train("apply", by_autotune)
try:
    hvd.join()
except InvalidInput as refusal:
    print("join", refusal, flush=True)
hvd.shutdown()
