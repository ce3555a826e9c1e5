"""Runs training scripts in their own processes."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch_world import exempt_imports, fork_server

from runtime_rewriter.ports import unclaimed_port

ABORTED_AT_EXIT = "terminate called without an active exception"


Completed = subprocess.CompletedProcess[str]


def again_if_aborted(run: Callable[[], Completed]) -> Completed:
    """Run a script, and once more if torch crashed at its exit.

    On a busy machine any DDP script on gloo rarely crashes so, also without us: a thread of torch
    still runs while the interpreter shuts down. The script has finished its work by then.
    """
    done = run()
    if done.returncode == 0 or ABORTED_AT_EXIT not in done.stderr:
        return done
    return run()


def run_script(command: Sequence[str], **options: Any) -> Completed:
    return again_if_aborted(
        lambda: subprocess.run(command, capture_output=True, text=True, check=False, **options)
    )


def run_ranks(
    words: Sequence[str],
    ranks: int = 0,
    timeout_s: float = 240.0,
    process: Callable[..., BaseProcess] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `python words` in `ranks` processes with torchrun's variables, or in one without them
    (0).
    """
    shared = {"CUDA_VISIBLE_DEVICES": ""}
    if not ranks:
        return run_forked(words, [shared], timeout_s, process)
    size, port = str(ranks), str(unclaimed_port("127.0.0.1"))
    shared |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    of_ranks = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    return run_forked(words, of_ranks, timeout_s, process)


def run_forked(
    words: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    timeout_s: float = 240.0,
    process: Callable[..., BaseProcess] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `python words` once with each of these variables, and one thread in each process.

    They are forked from a process that has imported torch, which takes most of a short script's
    time. `process`: builds the processes; by default they are forked from `fork_server`.
    """
    build = process or fork_server().Process
    with tempfile.TemporaryDirectory() as folder:
        streams = [str(Path(folder, name)) for name in ("stdout", "stderr")]
        processes = [
            build(target=_run, args=([*words], {**variables}, streams), daemon=True)
            for variables in environments
        ]
        for started in processes:
            started.start()
        deadline = time.monotonic() + timeout_s
        for started in processes:
            started.join(max(0.0, deadline - time.monotonic()))
            if started.is_alive():
                started.kill()
                started.join()
        output, errors = (Path(stream).read_text() for stream in streams)
    return subprocess.CompletedProcess(
        words, next((p.exitcode for p in processes if p.exitcode), 0), output, errors
    )


def _run(words: list[str], environment: dict[str, str], streams: list[str]) -> None:
    exempt_imports()
    for descriptor, path in enumerate(streams, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), descriptor)
    os.environ.update({"OMP_NUM_THREADS": "1", **environment})
    torch.set_num_threads(1)
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    runpy.run_path(words[0], run_name="__main__")
