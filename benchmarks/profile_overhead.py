"""What recording costs: `python -m benchmarks.profile_overhead`.

    python -m benchmarks.profile_overhead --models resnet gpt --blocks 40

Two ranks train the models of the example scripts over Gloo under torch's DDP. Short blocks of steps with and without the recording (Kineto,
the marks and the log of collectives, as `autotune profile` has them) follow each other in the same process, in turn first and second, so
that what others do to the cores meets both; the overhead of a pair is the ratio of the times of the slowest rank's steps, less 1. Starting
and stopping the trace is outside of the blocks. Medians over the pairs, with quartiles of the pairs and a 95 % interval of the median
(bootstrap). `overhead_quiet` is the ratio of the lower deciles of all steps: what disturbs a step only ever adds to it, so that this
figure needs fewer blocks on a machine that others use. `cpu_overhead_*` is the same for the CPU time of the rank's process, all threads:
what is left of the figure where others use the cores. The last line is one JSON object; `overhead_median` is the largest of the models'
medians.
"""

from __future__ import annotations

import argparse
import contextlib
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

STEPS = 2
"""Of a block."""
SETTLING = 1
"""Steps at the begin of a block, recorded or not as the block is, untimed."""
RESAMPLES = 2000


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
    """One rank: the times of every block, with and without, on the slowest rank."""
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

    def block(record: bool, count: bool = False) -> tuple[list[list[float]], int]:
        took = torch.zeros(2, STEPS, dtype=torch.float64)
        with Recording(options) if record else contextlib.nullcontext() as recording:
            for number in range(-SETTLING, STEPS):
                cpu_s = time.process_time()
                if recording is not None:
                    recording.trace.begin_step()
                step_s = step()
                if recording is not None:
                    recording.trace.end_step()
                if number >= 0:
                    took[0, number], took[1, number] = step_s, time.process_time() - cpu_s
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        return took.tolist(), len(recording.trace.read()["traceEvents"]) if recording is not None and count else 0

    for first in (False, True):  # the first trace loads what takes long
        block(first)
    found = []
    for number in range(blocks):
        order = (False, True) if number % 2 == 0 else (True, False)
        pair = {record: block(record)[0] for record in order}
        found.append([pair[False], pair[True]])
    _, events = block(True, count=True)
    if rank == 0:
        Path(out).write_text(json.dumps({"took_s": found, "events": events / (STEPS + SETTLING)}), encoding="utf-8")
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
        told = json.loads(Path(out).read_text(encoding="utf-8"))
    found = np.array(told["took_s"])  # (blocks, 2, 2, STEPS)
    ratios = found[:, 1].sum(axis=2) / found[:, 0].sum(axis=2) - 1  # (blocks, 2)
    quiet = np.quantile(found, 0.1, axis=(0, 3))  # (2, 2)
    return {
        **_spread("overhead", ratios[:, 0]),
        "overhead_quiet": float(quiet[1, 0] / quiet[0, 0] - 1),
        **_spread("cpu_overhead", ratios[:, 1]),
        "cpu_overhead_quiet": float(quiet[1, 1] / quiet[0, 1] - 1),
        "step_s": float(np.median(found[:, 0, 0])),
        "recorded_step_s": float(np.median(found[:, 1, 0])),
        "cpu_step_s": float(np.median(found[:, 0, 1])),
        "events_per_step": told["events"],
        "blocks": blocks,
    }


def _spread(name: str, ratios: np.ndarray) -> dict[str, Any]:
    """Median, quartiles of the pairs, and the 95 % interval of their median."""
    drawn = np.random.default_rng(0).choice(ratios, (RESAMPLES, len(ratios)))
    return {
        f"{name}_median": float(np.median(ratios)),
        f"{name}_quartiles": np.quantile(ratios, [0.25, 0.75]).tolist(),
        f"{name}_interval": np.quantile(np.median(drawn, axis=1), [0.025, 0.975]).tolist(),
    }


def _told(found: dict[str, Any], name: str) -> str:
    low, high = found[f"{name}_interval"]
    return f"{found[f'{name}_median']:+.1%} ({low:+.1%} to {high:+.1%}, quiet {found[f'{name}_quiet']:+.1%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=sorted(MODELS))
    parser.add_argument("--blocks", type=int, default=40, help="pairs of blocks per model (default 40)")
    for name in ("record_shapes", "profile_memory", "with_stack"):
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true")
    options = parser.parse_args()
    chosen = {name: getattr(options, name) for name in ("record_shapes", "profile_memory", "with_stack")}
    loads, models = [os.getloadavg()[0]], {}
    for name in options.models:
        models[name] = overhead(name, options.blocks, chosen)
        loads.append(os.getloadavg()[0])
        one = models[name]
        wall, cpu = (_told(one, name) for name in ("overhead", "cpu_overhead"))
        times = f"{one['step_s'] * 1e3:.1f} ms, recorded {one['recorded_step_s'] * 1e3:.1f} ms"
        print(f"{name}: {times}: {wall}, of CPU {cpu}; {one['events_per_step']:.0f} events a step", flush=True)
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
