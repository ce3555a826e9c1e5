"""Time all-reduces as one rank: `all_reduce_times.py REPEATS BYTES...`, with torchrun's variables.

Rank 0 prints a JSON object: size -> median over the repeats of the slowest rank's time in seconds.
Sizes are interleaved. It runs under round-robin scheduling if that is permitted, as the ranks of an
emulated accelerator do.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.distributed as dist

from runtime_rewriter.scheduling import take_round_robin


def main() -> None:
    take_round_robin()
    repeats, sizes = int(sys.argv[1]), [int(word) for word in sys.argv[2:]]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tensors = {size: torch.ones(size // 4) for size in sizes}
    taken = torch.zeros(len(sizes), repeats + 1, dtype=torch.float64)
    for repeat in range(repeats + 1):  # the first one is not counted
        for row, size in enumerate(sizes):
            dist.barrier()
            began_s = time.perf_counter()
            dist.all_reduce(tensors[size])
            taken[row, repeat] = time.perf_counter() - began_s
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(json.dumps({size: float(taken[row, 1:].median()) for row, size in enumerate(sizes)}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
