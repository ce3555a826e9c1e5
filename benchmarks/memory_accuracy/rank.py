"""Record a profile, or train under a plan and measure, in one fresh process; print a JSON line.

    python -m benchmarks.memory_accuracy.rank LIBRARY MODEL profile
    python -m benchmarks.memory_accuracy.rank LIBRARY MODEL ddp|PLAN.json MEETING

LIBRARY is the counter in front of the CPU's allocator, or `cuda`. MEETING is an `init_method` of
torch; RANK and WORLD_SIZE are set.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from autotune.errors import InvalidStrategy
from autotune.strategy_space.plan import Plan
from benchmarks.memory_accuracy.c10_memory import AllocatorCounter, DeviceCounter
from benchmarks.memory_accuracy.models import JOBS, OUTSIDE_BYTES, ExampleJob
from runtime_rewriter.pytorch.agreement import assumed_workload
from runtime_rewriter.pytorch.ddp import PlannedDataParallel
from runtime_rewriter.recording.memory.recorder import MemoryRecorder

SETTLE_STEPS = 3  # the first forward pass under a cross-step plan only records its reads
MEASURED_STEPS = 3


def recorded(job: ExampleJob) -> dict[str, Any]:
    profile = MemoryRecorder(job.module).record(lambda: job.step(job.module))
    return {"profile": profile.to_data(), "workload": assumed_workload(job.module).to_data()}


def measured(
    job: ExampleJob, plan: Plan | None, counter: AllocatorCounter | DeviceCounter, outside: int
) -> dict[str, Any]:
    """Return the highest bytes of the steps after the first ones.

    A plan is loaded after steps without one, as the tuner does. An exception is sparse gradients
    over NCCL, which DDP's reducer does not send.
    """
    model: Any = (
        DistributedDataParallel(job.module) if plan is None else PlannedDataParallel(job.module)
    )
    if plan is None or not _refused_by_ddp(job):
        for _ in range(SETTLE_STEPS):
            job.step(model)
    if plan is not None:
        model.synchronizer.load(plan)
        gc.collect()
        for _ in range(SETTLE_STEPS):
            job.step(model)
    counter.reset()
    for _ in range(MEASURED_STEPS):
        job.step(model)
    result = {"peak_bytes": counter.peak_bytes - outside}
    dist.barrier()
    if plan is not None:
        model.synchronizer.close()
    # Before its process group: torch 2.13 may wait for gloo's threads for ever if DDP is released
    # last.
    del model
    dist.destroy_process_group()
    return result


def _refused_by_ddp(job: ExampleJob) -> bool:
    return dist.get_backend() == "nccl" and any(
        getattr(module, "sparse", False) for module in job.module.modules()
    )


def main() -> None:
    library, name, what, *meeting = sys.argv[1:]
    counter = DeviceCounter() if library == "cuda" else AllocatorCounter(Path(library))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    job = JOBS[name]()
    if what == "profile":
        result = recorded(job)
    else:
        plan = None if what == "ddp" else Plan.from_json(Path(what).read_text())
        backend = "nccl" if isinstance(counter, DeviceCounter) else "gloo"
        dist.init_process_group(
            backend,
            init_method=meeting[0],
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
        )
        if plan is None and _refused_by_ddp(job):
            result = {"refused": "torch's DDP does not send sparse gradients over NCCL"}
        else:
            try:
                result = measured(job, plan, counter, OUTSIDE_BYTES.get(name, 0))
            except (
                InvalidStrategy
            ) as refusal:  # on all ranks: a script that clips cannot cross the step
                result = {"refused": str(refusal)}
    print(json.dumps(result), flush=True)
    os._exit(0)  # threads of a refused plan may wait for the other rank


if __name__ == "__main__":
    main()
