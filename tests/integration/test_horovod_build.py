"""The Horovod of `make horovod` works with both frameworks on two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

SCRIPT = Path(__file__).parents[1] / "scripts/horovod_sums.py"
RANKS = 2


@pytest.fixture
def rendezvous() -> Iterator[int]:
    """Serve Horovod's store of addresses on loopback; return its port."""
    server = RendezvousHTTPServer(("127.0.0.1", 0), RendezvousHandler, 0)
    server.scope_size["global"] = RANKS
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def rank_settings(rank: int, port: int) -> dict[str, str]:
    """Return the environment that `horovodrun --gloo` gives a rank of one host."""
    settings = {
        "CONTROLLER": "gloo",
        "CPU_OPERATIONS": "gloo",
        "GLOO_IFACE": "lo",
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
    return os.environ | {f"HOROVOD_{name}": str(value) for name, value in settings.items()}


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_two_ranks_sum_and_average(framework, rendezvous):
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), framework],
            env=rank_settings(rank, rendezvous),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        printed = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], printed
    for out, _ in printed:
        assert json.loads(out) == {
            "size": 2,
            "gloo": True,
            "mpi": False,
            "sum": [3.0, 6.0, 9.0],
            "average": [1.5, 3.0, 4.5],
        }
