"""The world on child processes of the test, without Ray: tests scripts and plans, not places.

The ranks are forked from a process that has torch imported: that is most of what a start costs.
"""

from __future__ import annotations

import multiprocessing.context
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, ClassVar

import torch
from torch_world import exempt_imports, fork_server

from autotune.records import REAL_CONDITIONS, Conditions
from autotune.tuning import statistics
from autotune.workload import Workload
from runtime_rewriter.ports import unclaimed_port
from runtime_rewriter.rank import launch
from runtime_rewriter.scheduling import requested_conditions
from runtime_rewriter.world.placement import Launch
from runtime_rewriter.world.script_command import ScriptCommand
from runtime_rewriter.world.worker import Polled, ProcessSupervisor
from runtime_rewriter.world.world import PROBE_S, World


class ForkedRank:
    """Implements `Process`; the class itself is a `Spawn`."""

    kind: ClassVar[type[BaseProcess]] = multiprocessing.context.ForkServerProcess

    def __init__(
        self,
        words: list[str],
        environment: dict[str, str],
        directory: str,
        log: IO[bytes],
        line: socket.socket,
    ) -> None:
        context = fork_server()
        receiver, sender = context.Pipe(duplex=False)
        self._process = self.kind(
            target=_rank, args=(sender, words, environment, directory, log.name, line), daemon=True
        )
        self._process.start()
        sender.close()
        receiver.recv()  # from now on its session can be killed
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("rank", timeout)
        return self._process.exitcode


def _rank(
    sender: Connection,
    words: list[str],
    environment: dict[str, str],
    directory: str,
    log: str,
    line: socket.socket,
) -> None:
    exempt_imports()
    os.setsid()
    sender.send(None)
    sender.close()
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.exit(launch.main(["--control", str(line.detach()), "--", *words]))


def forked() -> ProcessSupervisor:
    return ProcessSupervisor(ForkedRank)


class LocalPlacement:
    """Implements `Placement` on one host without Ray."""

    def __init__(
        self,
        command: ScriptCommand,
        directory: Path,
        conditions: Conditions,
        supervisor: Callable[[], ProcessSupervisor],
    ) -> None:
        self._command, self._directory, self._conditions = command, directory, conditions
        self.workers = [supervisor() for _ in range(command.workers)]
        self._threads = ThreadPoolExecutor(command.workers)

    @property
    def hosts(self) -> tuple[tuple[str, int], ...]:
        return (("here", len(self.workers)),)

    @property
    def addresses(self) -> tuple[str, ...]:
        return ()

    def launch(self) -> Launch:
        size = str(len(self.workers))
        shared = {
            **requested_conditions(self._conditions),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(unclaimed_port("127.0.0.1")),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "GROUP_RANK": "0",
        }
        ranks = range(len(self.workers))
        environments = tuple(
            {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in ranks
        )
        return Launch(
            self._command,
            environments,
            str(self._directory),
            tuple(str(self._directory / f"rank{rank}.log") for rank in ranks),
        )

    def poll(self, timeout_s: float) -> list[Polled]:
        return list(self._threads.map(lambda worker: worker.poll(timeout_s), self.workers))

    def release(self) -> None:
        for worker in self.workers:
            worker.stop()
        self._threads.shutdown()


def local_world(
    script: Path,
    words: tuple[str, ...],
    directory: Path,
    *,
    ranks: int = 2,
    step_timeout_s: float = 60.0,
    start_timeout_s: float = 240.0,
    conditions: Conditions = REAL_CONDITIONS,
    given_profile: Workload | None = None,
    probe_s: float = PROBE_S,
    supervisor: Callable[[], ProcessSupervisor] = forked,
    keeps_training: bool = False,
) -> World:
    """`ray_world` without Ray."""
    command = ScriptCommand(str(script), words, False, ranks)
    return World(
        lambda: LocalPlacement(command, directory, conditions, supervisor),
        step_timeout_s,
        start_timeout_s,
        statistics,
        conditions.accelerators,
        given_profile,
        probe_s,
        keeps_training,
    )
