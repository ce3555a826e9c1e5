"""A minimal data-parallel training for `autotune probe`: `python -m runtime_rewriter.probe.script`.

Every rank reaches a step boundary, where the links are probed, and then trains until it is ended.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

WIDTH = 8


def main() -> None:
    """Train with the ranks of the environment, as torchrun sets them."""
    local_rank, local_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks
    device = torch.device("cuda", local_rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(WIDTH, WIDTH).to(device))
    while True:
        model(torch.ones(1, WIDTH, device=device)).sum().backward()
        model.zero_grad()


if __name__ == "__main__":
    main()
