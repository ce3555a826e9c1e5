"""Train a model of DDP, and write torch's own traces of each rank: `train_traced.py FOLDER`."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile, schedule

STEPS = 14


def main(folder: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    widths = nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    model = DistributedDataParallel(nn.Sequential(*widths), bucket_cap_mb=0.5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data, target = torch.randn(64, 256), torch.randint(0, 10, (64,))
    executed = ExecutionTraceObserver().register_callback(f"{folder}/et_rank{rank}.json")
    with profile(
        activities=[ProfilerActivity.CPU],
        execution_trace_observer=executed,
        schedule=schedule(wait=1, warmup=1, active=STEPS - 2),
        on_trace_ready=lambda done: done.export_chrome_trace(f"{folder}/rank{rank}.json.gz"),
        record_shapes=True,
    ) as profiler:
        for step in range(STEPS):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(data), target).backward()
            optimizer.step()
            if step == STEPS - 1:
                # torch writes a collective's node when Gloo's thread has left it, and the trace
                # must not have ended
                time.sleep(0.2)
            profiler.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
