"""A DDP script whose computation is a timed wait, for the null experiment.

Under the plan `--slow-plan` every step waits `--factor` times as long, which plants a difference of
known size. No user's script would look at the loaded plan. With `--steps` it comes to its end.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--wait-s", type=float, default=0.02)
    parser.add_argument("--slow-plan", default="")
    parser.add_argument("--factor", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=1_000_000)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(options.steps):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 16)).square().mean()
        plan = model.synchronizer.plan
        slow = plan is not None and plan.id == options.slow_plan
        time.sleep(options.wait_s * (options.factor if slow else 1.0))
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
