"""The script of `train_small.py` for Horovod: model, data and planted faults.

A fault acts in the middle of the backward pass, when some gradients are already on their way.
"""

import argparse
from pathlib import Path

import horovod.torch as hvd
import torch
from train_small import misbehave  # type: ignore[import-not-found]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--fault")
    parser.add_argument("--fault-step", type=int, default=30)
    parser.add_argument("--fault-file", type=Path)
    parser.add_argument("--without-init", action="store_true")
    options = parser.parse_args()
    if not options.without_init:
        hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    inner = (torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    model = torch.nn.Sequential(*inner, torch.nn.Linear(64, 8))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
    )
    faulty = options.fault and hvd.rank() == hvd.size() - 1
    step = 0

    def in_backward(gradient: torch.Tensor) -> None:
        if faulty and step == options.fault_step:
            misbehave(options.fault.split(","), options.fault_file)

    inner[2].weight.register_hook(in_backward)
    data = torch.Generator().manual_seed(hvd.rank())
    for step in range(options.steps):  # noqa: B007 - the hook reads it
        optimizer.zero_grad()
        model(torch.randn(16, 32, generator=data)).square().mean().backward()
        optimizer.step()
    enacted_by = optimizer.synchronize.__qualname__
    print(f"rank {hvd.rank()} of {hvd.size()} synchronized by {enacted_by}", flush=True)


if __name__ == "__main__":
    main()
