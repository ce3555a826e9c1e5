"""The Horovod of `make horovod` works with both frameworks on two ranks."""

from __future__ import annotations

import importlib
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer
from tensorflow_ranks import TensorflowProcess
from torch_world import run_world

RANKS = 2
FRAMEWORKS = ("torch", "tensorflow")


@contextmanager
def rendezvous() -> Iterator[int]:
    """Serve Horovod's store of addresses on loopback; return its port."""
    server = RendezvousHTTPServer(("127.0.0.1", 0), RendezvousHandler, 0)
    server.scope_size["global"] = RANKS
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def rank_settings(rank: int, port: int) -> dict[str, str]:
    """Return the environment that `horovodrun --gloo` gives a rank of one host."""
    settings = {
        "CONTROLLER": "gloo",
        "CPU_OPERATIONS": "gloo",
        "GLOO_IFACE": "lo",
        "GLOO_TIMEOUT_SECONDS": 240,
        "GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "GLOO_RENDEZVOUS_PORT": port,
        "HOSTNAME": "localhost",
        "RANK": rank,
        "SIZE": RANKS,
        "LOCAL_RANK": rank,
        "LOCAL_SIZE": RANKS,
        "CROSS_RANK": 0,
        "CROSS_SIZE": 1,
    }
    return {f"HOROVOD_{name}": str(value) for name, value in settings.items()}


def sums(rank: int, ports: dict[str, int]) -> dict[str, Any]:
    """By framework: what Horovod built in, and what its all-reduces of a small tensor give."""
    dist.destroy_process_group()
    warnings.simplefilter("default")  # of Horovod's own modules
    found = {}
    for name in FRAMEWORKS:
        os.environ |= rank_settings(rank, ports[name])
        framework: Any = importlib.import_module(name)
        hvd: Any = importlib.import_module(f"horovod.{name}")
        hvd.init()
        tensor = getattr(framework, "tensor", None) or framework.constant
        mine = tensor([value * (rank + 1) for value in (1.0, 2.0, 3.0)])
        found[name] = {
            "size": hvd.size(),
            "gloo": bool(hvd.gloo_built()),
            "mpi": bool(hvd.mpi_built()),
            "sum": hvd.allreduce(mine, op=hvd.Sum, name="sum").numpy().tolist(),
            "average": hvd.allreduce(mine, op=hvd.Average, name="average").numpy().tolist(),
        }
        hvd.shutdown()
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    with rendezvous() as of_torch, rendezvous() as of_tensorflow:
        ports = dict(zip(FRAMEWORKS, (of_torch, of_tensorflow), strict=True))
        return run_world(sums, RANKS, ports, timeout_s=240.0, process=TensorflowProcess)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_two_ranks_sum_and_average(framework, found) -> None:
    for of_rank in found:
        assert of_rank[framework] == {
            "size": 2,
            "gloo": True,
            "mpi": False,
            "sum": [3.0, 6.0, 9.0],
            "average": [1.5, 3.0, 4.5],
        }
