"""Run ranks on this machine's loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.repository import ROOT, last_json
from benchmarks.testbed_fidelity.processes import WAIT_S


def ranks_on_loopback(module: str, words: Sequence[str], ranks: int) -> dict[str, Any]:
    """Run a module as every rank on this machine and return the findings of rank 0."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    shared |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module, *words]
    processes = []
    for rank in range(ranks):
        environment = {**os.environ, **shared, "RANK": str(rank)}
        pipe = subprocess.PIPE
        processes.append(
            subprocess.Popen(command, cwd=ROOT, stdout=pipe, text=True, env=environment)
        )
    try:
        texts = [process.communicate(timeout=2 * WAIT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise SystemExit("a rank failed; see its output above")
    return last_json(texts[0])
