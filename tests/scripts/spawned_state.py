"""A script whose ranks write what they see, after its main code has changed all of it."""

import json
import os
import random
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

CUDNN = torch.backends.cudnn
LATE: bool


def state() -> dict[str, object]:
    return {
        "cudnn": [CUDNN.deterministic, CUDNN.benchmark, CUDNN.allow_tf32],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "matmul": torch.backends.cuda.matmul.fp32_precision,
        "dtype": str(torch.get_default_dtype()),
        "threads": torch.get_num_threads(),
        "gradients": torch.is_grad_enabled(),
        "start method": mp.get_start_method(),
        "late": "LATE" in globals(),
    }


def drawn() -> list[float]:
    return [random.random(), np.random.rand(), torch.rand(1, dtype=torch.float64).item()]


def train(rank: int, ranks: int, port: str, token: str, shared: torch.Tensor, out: str) -> None:
    facts = {"state": state(), "same token": token == os.environ["TOKEN"]}
    facts["drawn"] = drawn()
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", port  # as in the tutorial
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    shared[rank] = 1 + rank
    facts["token"] = token
    Path(out, f"rank{rank}.json").write_text(json.dumps(facts))
    dist.barrier()  # the other rank may still connect
    dist.destroy_process_group()
    if rank == 1:
        sys.exit()  # it is done


def main(out: str, port: str) -> None:
    global LATE
    LATE = True
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1)
    CUDNN.deterministic, CUDNN.benchmark, CUDNN.allow_tf32 = True, True, False
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("high")
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    token = os.environ["TOKEN"] = os.urandom(8).hex()
    shared = torch.zeros(2, dtype=torch.int64)
    mp.spawn(train, (2, port, token, shared, out), nprocs=2)
    after: dict[str, object] = {"state": state(), "shared": shared.tolist(), "drawn": drawn()}
    after["port"] = os.environ.get("MASTER_PORT") == port
    Path(out, f"main{os.environ.get('LOCAL_RANK', '0')}.json").write_text(json.dumps(after))


if __name__ == "__main__":
    main(*sys.argv[1:])
