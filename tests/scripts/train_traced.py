"""Train a model of DDP, and write torch's own traces of each rank: `train_traced.py FOLDER`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

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
                until_gloo_sleeps()
            profiler.step()
    dist.barrier()
    dist.destroy_process_group()


def until_gloo_sleeps() -> None:
    """Wait until every thread of Gloo has nothing more to do."""
    deadline_s, quiet = time.monotonic() + 60, 0
    while quiet < 3 and time.monotonic() < deadline_s:
        time.sleep(0.05)
        quiet = 0 if any(map(is_at_work, Path("/proc/self/task").iterdir())) else quiet + 1


def is_at_work(thread: Path) -> bool:
    of_gloo = (thread / "comm").read_text().startswith("pt_gloo")
    return of_gloo and (thread / "stat").read_text().rpartition(")")[2].split()[0] != "S"


if __name__ == "__main__":
    main(sys.argv[1])
