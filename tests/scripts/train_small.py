"""A small DDP script, written as a user would, with planted faults for tests.

`--fault KIND` acts at `--fault-step` on the last rank. It creates `--fault-file` first, and does
nothing if the file exists. Without a file it acts every time. Several kinds, separated by commas,
act at successive starts, each with its own file.
"""

import argparse
import gc
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def misbehave(kinds: list[str], file: Path | None) -> None:
    kind = kinds[0]
    if file is not None:
        markers = {kind: file.with_name(f"{file.name}-{kind}") for kind in kinds}
        left = [kind for kind, marker in markers.items() if not marker.exists()]
        if not left:
            return
        kind = left[0]
        markers[kind].touch()
    if kind == "crash":
        raise RuntimeError("planted crash")
    if kind == "exit":
        os._exit(7)
    if kind == "end":
        sys.exit()
    if kind == "status":
        sys.exit(3)
    if kind == "supervisor":
        os.kill(os.getppid(), signal.SIGKILL)
    if kind == "hang":
        time.sleep(3600)
    if kind == "memory":
        torch.empty(2**60)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--fault")
    parser.add_argument("--fault-step", type=int, default=30)
    parser.add_argument("--fault-file", type=Path)
    parser.add_argument("--loss-scale", type=float, default=1.0)
    parser.add_argument("--without-ddp", action="store_true")
    parser.add_argument("--clip", action="store_true", help="clip gradients by their global norm")
    parser.add_argument("--further-model", action="store_true", help="another DDP, not trained")
    parser.add_argument("--further-steps", type=int, default=0, help="of it, in every step")
    parser.add_argument("--wrap-again", type=int, help="wrap the model again after this many steps")
    accumulate = "backward passes per step of the optimizer, each synchronized"
    parser.add_argument("--accumulate", type=int, default=1, help=accumulate)
    parser.add_argument("--evaluate", action="store_true", help="after every step")
    options = parser.parse_args()
    assert gc.isenabled(), "collection is paused for our imports alone"
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    width = options.width
    inner = (torch.nn.Linear(32, width), torch.nn.ReLU(), torch.nn.Linear(width, width))
    model = torch.nn.Sequential(*inner, torch.nn.Linear(width, 8))
    wrapped = model if options.without_ddp else DistributedDataParallel(model)
    has_further = options.further_model or options.further_steps
    further = DistributedDataParallel(torch.nn.Linear(8, 1)) if has_further else None
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(dist.get_rank())
    for step in range(options.steps):
        is_last_rank = dist.get_rank() == dist.get_world_size() - 1
        if options.fault and step == options.fault_step and is_last_rank:
            misbehave(options.fault.split(","), options.fault_file)
        if step == options.wrap_again:
            wrapped = DistributedDataParallel(model)
        for _ in range(options.further_steps):
            further(torch.randn(4, 8)).square().mean().backward()
        if step % options.accumulate == 0:
            optimizer.zero_grad()
        loss = wrapped(torch.randn(16, 32, generator=data)).square().mean() * options.loss_scale
        loss.backward()
        if options.clip:
            torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 0.1)
        if (step + 1) % options.accumulate == 0:
            optimizer.step()
        if options.evaluate:
            with torch.no_grad():
                wrapped(torch.randn(16, 32, generator=data))
    if options.wrap_again:
        print(f"trained {options.steps} steps", flush=True)
    # Before its process group: torch 2.13 may hang if DDP is the last to release it.
    del wrapped, further
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
