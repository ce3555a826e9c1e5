"""A script without DDP that calls `autotune.apply`, and prints a digest of its parameters."""

import argparse
import hashlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import autotune


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--strategy")
    parser.add_argument("--with-ddp", action="store_true", help="torch's own, to compare with")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())  # rank 0's parameters must reach all ranks
    model = torch.nn.Sequential(
        torch.nn.Linear(32, options.width), torch.nn.ReLU(), torch.nn.Linear(options.width, 8)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    trained: torch.nn.Module = model
    if options.with_ddp:
        trained = DistributedDataParallel(model)
    else:
        for note in autotune.apply(model, optimizer, options.strategy).notes:
            print(f"note: {note}\n", end="")  # one write, so that ranks do not interleave
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(options.steps):
        optimizer.zero_grad()
        trained(torch.randn(16, 32, generator=data)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    digest = hashlib.sha256(flat.numpy().tobytes()).hexdigest()
    print(f"digest {dist.get_rank()} {digest}\n", end="")
    # Before its process group: torch 2.13 may hang if DDP is the last to release it.
    del trained
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
