"""What recording costs: `python -m benchmarks.profile_overhead`.

    python -m benchmarks.profile_overhead --models resnet gpt --blocks 12

Two ranks train the models of the example scripts over Gloo under torch's DDP. Blocks of steps with and without the recording (Kineto,
the marks and the log of collectives, as `autotune profile` has them) follow each other in the same process, in turn first and second;
within a pair the overhead is the ratio of the two medians of the slowest rank's steps, less 1. Starting and stopping the trace is outside
of the blocks. `cpu_overhead_median` is the same for the CPU time of the rank's process, all threads: what is left of the figure where
others use the cores. The last line is one JSON object; `overhead_median` is the largest of the models' medians.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

STEPS = 6
"""Of a block."""
SETTLING = 2
"""Steps between two blocks, untimed."""


def resnet() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """The ResNet of examples/resnet_digits.py at its default size, batches of 16 images."""
    from resnet_digits import ResNet

    images, labels = torch.randn(16, 1, 32, 32), torch.randint(0, 10, (16,))
    return ResNet(32), lambda model: F.cross_entropy(model(images), labels)


def gpt() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """The GPT of examples/gpt_text.py at its default size, batches of 8 sequences."""
    from gpt_text import GPT

    tokens = torch.randint(0, 2000, (8, 65))
    model = GPT(2000, 64, 256, 4, 4, 0.1)
    return model, lambda wrapped: F.cross_entropy(wrapped(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


MODELS = {"resnet": resnet, "gpt": gpt}


class Recording:
    """What a recorder does to the steps, without its files: the part of `StepRecorder` between settling and writing."""

    def __init__(self, options: dict[str, bool]) -> None:
        from runtime_rewriter.tracing.collectives import CollectiveLog
        from runtime_rewriter.tracing.kineto import KinetoTrace
        from runtime_rewriter.tracing.settings import RecordSettings

        self.log = CollectiveLog()
        self.watching = self.log.watching()
        self.trace = KinetoTrace(RecordSettings(folder="", **options), torch.device("cpu"))

    def __enter__(self) -> Recording:
        self.watching.__enter__()
        self.trace.prepare()
        self.trace.start()
        self.log.traced = True
        return self

    def __exit__(self, *_: object) -> None:
        self.trace.stop()
        self.watching.__exit__(None, None, None)


def measure(rank: int, port: int, name: str, blocks: int, options: dict[str, bool], out: str) -> None:
    """One rank: median step of each block, with and without, on the slowest rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    model, loss = MODELS[name]()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)

    def step() -> float:
        started_s = time.perf_counter()
        optimizer.zero_grad()
        loss(wrapped).backward()
        optimizer.step()
        return time.perf_counter() - started_s

    def block(record: bool) -> list[list[float]]:
        took = torch.zeros(2, STEPS, dtype=torch.float64)  # seconds on the wall and of the process's threads
        for _ in range(SETTLING):
            step()
        cpu_s = time.process_time()
        if not record:
            for number in range(STEPS):
                took[0, number], took[1, number], cpu_s = step(), time.process_time() - cpu_s, time.process_time()
        else:
            with Recording(options) as recording:
                cpu_s = time.process_time()
                for number in range(STEPS):
                    recording.trace.begin_step()
                    took[0, number] = step()
                    recording.trace.end_step()
                    took[1, number], cpu_s = time.process_time() - cpu_s, time.process_time()
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        values: list[list[float]] = took.tolist()
        return values

    for first in (False, True):  # the first trace loads what takes long
        block(first)
    found = []
    for number in range(blocks):
        order = (False, True) if number % 2 == 0 else (True, False)
        pair = {record: block(record) for record in order}
        found.append([pair[False], pair[True]])
    if rank == 0:
        Path(out).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def overhead(name: str, blocks: int, options: dict[str, bool]) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory:
        out = str(Path(directory) / "found.json")
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=measure, args=(rank, port, name, blocks, options, out)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit(f"a rank of {name} failed")
        found = np.array(json.loads(Path(out).read_text(encoding="utf-8")))  # (blocks, 2, 2, STEPS)
    ratios = np.median(found[:, 1], axis=2) / np.median(found[:, 0], axis=2) - 1  # (blocks, 2)
    low, middle, high = np.quantile(ratios[:, 0], [0.25, 0.5, 0.75])
    return {
        "overhead_median": float(middle),
        "overhead_quartiles": [float(low), float(high)],
        "cpu_overhead_median": float(np.median(ratios[:, 1])),
        "cpu_overhead_quartiles": np.quantile(ratios[:, 1], [0.25, 0.75]).tolist(),
        "step_s": float(np.median(found[:, 0, 0])),
        "recorded_step_s": float(np.median(found[:, 1, 0])),
        "blocks": blocks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=sorted(MODELS))
    parser.add_argument("--blocks", type=int, default=12, help="pairs of blocks per model (default 12)")
    for name in ("record_shapes", "profile_memory", "with_stack"):
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true")
    options = parser.parse_args()
    chosen = {name: getattr(options, name) for name in ("record_shapes", "profile_memory", "with_stack")}
    loads, models = [os.getloadavg()[0]], {}
    for name in options.models:
        models[name] = overhead(name, options.blocks, chosen)
        loads.append(os.getloadavg()[0])
        one = models[name]
        quartiles = " to ".join(f"{value:+.1%}" for value in one["overhead_quartiles"])
        times = f"{one['step_s'] * 1e3:.1f} ms, recorded {one['recorded_step_s'] * 1e3:.1f} ms"
        print(f"{name}: {times}: {one['overhead_median']:+.1%} ({quartiles}), of CPU {one['cpu_overhead_median']:+.1%}")
    print(
        json.dumps(
            {
                "overhead_median": max(one["overhead_median"] for one in models.values()),
                "models": models,
                "options": chosen,
                "load": [statistics.fmean(loads), max(loads)],
                "cores": os.cpu_count(),
            }
        )
    )


if __name__ == "__main__":
    main()
