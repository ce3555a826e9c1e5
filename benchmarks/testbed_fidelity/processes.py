"""Run processes inside the hosts of a testbed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from autotune.testbed.bed import Testbed, words_inside
from benchmarks.repository import ROOT

WAIT_S = 300.0
GOODPUT_S = 2.0


def inside(
    bed: Testbed, host: int, words: Sequence[str], stdin: int | None = None, /, **environment: str
) -> subprocess.Popen[str]:
    """Start a process in the host of this index, in the root of the repository.

    `stdin` as in `subprocess.Popen`.
    """
    command = [*words_inside(bed.hosts[host].namespace), *words]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=stdin,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def output(process: subprocess.Popen[str], wait_s: float = WAIT_S) -> str:
    """Return the output of a process that ended well; otherwise end the benchmark."""
    text, _ = process.communicate(timeout=wait_s)
    if process.returncode != 0:
        raise SystemExit(
            f"{process.args!r} ended with status {process.returncode}; see its output above"
        )
    return text


def first_rank_output(
    bed: Testbed, module: str, words: Sequence[str], port: int, wait_s: float = WAIT_S
) -> str:
    """Run a module as one rank in every host and return what rank 0 printed."""
    shared = {
        "MASTER_ADDR": bed.hosts[0].address,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": bed.interface,
        "WORLD_SIZE": str(len(bed.hosts)),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", module, *words]
    ranks = [inside(bed, rank, command, RANK=str(rank), **shared) for rank in range(len(bed.hosts))]
    outputs = [output(rank, wait_s) for rank in ranks]
    return outputs[0]


def streams(bed: Testbed, pairs: Sequence[tuple[int, int]]) -> dict[tuple[int, int], float]:
    """Return (sender, receiver) -> bytes per second of a TCP stream, all at once."""
    script = [sys.executable, str(ROOT / "benchmarks" / "testbed_fidelity" / "tcp_goodput.py")]
    receivers = [inside(bed, to, [*script, "receive", str(GOODPUT_S)]) for _, to in pairs]
    senders = [
        inside(bed, source, [*script, "send", bed.hosts[to].address]) for source, to in pairs
    ]
    reached = {
        pair: float(output(receiver)) for pair, receiver in zip(pairs, receivers, strict=True)
    }
    for sender in senders:
        output(sender)
    return reached
