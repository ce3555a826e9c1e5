"""A small DDP script that keeps checkpoints in its folder, as scripts do.

Every `--save-every` steps rank 0 replaces `best.pt` in the working folder and writes a checkpoint
next to the script, by its absolute path. All ranks then read `best.pt`, which must hold what they
have. With `--rotate` earlier checkpoints are deleted. At the end it writes `final.pt`, and
`ended-RANK` as the interpreter exits. SIGTERM makes it write `terminated-RANK` and exit.
"""

import argparse
import atexit
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

HERE = Path(__file__).resolve().parent


def save(model: torch.nn.Module, step: int, rotate: bool) -> None:
    if dist.get_rank() == 0:
        for earlier in HERE.glob("step-*.pt") if rotate else ():
            earlier.unlink()
        torch.save(model.state_dict(), "best.pt")
        torch.save(model.state_dict(), HERE / f"step-{step}.pt")
    dist.barrier()
    for name in ("best.pt", HERE / f"step-{step}.pt"):
        loaded = torch.load(name)
        for key, value in model.state_dict().items():
            if not torch.equal(loaded[key], value):
                raise RuntimeError(f"{name} is not what rank 0 saved")
    dist.barrier()


def end_early(rank: int) -> None:
    Path(f"terminated-{rank}").touch()
    sys.exit(143)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--rotate", action="store_true")
    parser.add_argument("--starts", type=Path, help="append a line per start and rank")
    parser.add_argument("--crash-step", type=int, help="at the first start, by --starts")
    parser.add_argument("--status", type=int, default=0, help="exit status")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, first = dist.get_rank(), options.starts is None or not options.starts.exists()
    dist.barrier()
    if options.starts is not None:
        namespace = Path("/proc/self/ns/mnt").stat().st_ino
        with options.starts.open("a") as starts:
            starts.write(f"{rank} {namespace} {Path('best.pt').read_bytes()!r}\n")
    signal.signal(signal.SIGTERM, lambda *_: end_early(rank))
    torch.manual_seed(0)
    inner = (torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    model = torch.nn.Sequential(*inner, torch.nn.Linear(64, 8))
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(rank)
    for step in range(options.steps):
        if first and step == options.crash_step:
            raise RuntimeError("planted crash")
        optimizer.zero_grad()
        wrapped(torch.randn(16, 32, generator=data)).square().mean().backward()
        optimizer.step()
        if step % options.save_every == 0:
            save(model, step, options.rotate)
    if rank == 0:
        torch.save(model.state_dict(), "final.pt")
    dist.barrier()  # a rank that fails ends the others soon
    atexit.register(Path(f"ended-{rank}").touch)
    del wrapped  # before its process group
    dist.destroy_process_group()
    sys.exit(options.status)


if __name__ == "__main__":
    main()
