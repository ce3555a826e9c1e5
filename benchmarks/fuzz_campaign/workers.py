"""Worker processes that try inputs, and the watch over their time and their lives."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from benchmarks.fuzz_campaign.outcomes import Outcome, Result
from benchmarks.fuzz_campaign.trial import LIMIT_S, limit_memory, try_input, warm

PART = 4000
"""Inputs per process: what a reader caches must not grow into the memory limit."""
START_S = 120.0
"""Time for a process to load the product on a busy machine."""


@dataclass(frozen=True)
class Part:
    """Inputs `first` to `end - 1` of one reader."""

    reader: str
    first: int
    end: int


@dataclass
class _Worker:
    """`number`: the input that it is at; `since_s`: when it began with that."""

    process: BaseProcess
    connection: Connection
    part: Part
    number: int
    since_s: float
    started: bool = False
    ended: bool = False

    @property
    def limit_s(self) -> float:
        return LIMIT_S if self.started else START_S


def parts_of(inputs: dict[str, int]) -> list[Part]:
    """The inputs of every reader in parts of at most `PART`."""
    return [
        Part(reader, first, min(first + PART, count))
        for reader, count in inputs.items()
        for first in range(0, count, PART)
    ]


def results(parts: list[Part], seed: int, processes: int) -> Iterator[Result]:
    """Try all inputs in `processes` processes and yield each result.

    A process that hangs or dies is replaced, and goes on after the input that it was at.
    """
    waiting = deque(parts)
    folder = Path(tempfile.mkdtemp(dir=_memory_folder()))
    running: list[_Worker] = []
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                running.append(_start(waiting.popleft(), seed, folder))
            wait([worker.connection for worker in running], timeout=1.0)
            for worker in list(running):
                yield from _received(worker)
                if worker.ended:
                    running.remove(worker)
                    worker.connection.close()
                    worker.process.join()
                    if worker.number < worker.part.end:
                        waiting.appendleft(replace(worker.part, first=worker.number))
    finally:
        for worker in running:
            worker.process.kill()
            worker.process.join()
        shutil.rmtree(folder, ignore_errors=True)


def _memory_folder() -> str | None:
    """Files in memory, where the system has such a folder."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _start(part: Part, seed: int, folder: Path) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(theirs, part, seed, folder), daemon=False)
    process.start()
    theirs.close()
    return _Worker(process, ours, part, part.first, time.monotonic())


def _work(connection: Connection, part: Part, seed: int, folder: Path) -> None:
    own = folder / f"{part.reader}-{part.first}"
    (own / "warm").mkdir(parents=True)
    warm(part.reader, own / "warm")
    limit_memory()
    connection.send(None)
    for number in range(part.first, part.end):
        connection.send(try_input(part.reader, seed, number, own / "input"))
    shutil.rmtree(own, ignore_errors=True)


def _received(worker: _Worker) -> list[Result]:
    """The results that have arrived, and the fault of a worker that died or had to be killed."""
    received: list[Result] = []
    try:
        while worker.connection.poll():
            result = worker.connection.recv()
            worker.since_s = time.monotonic()
            worker.started = True
            if result is not None:
                worker.number += 1
                received.append(result)
    except EOFError:
        worker.process.join()
        worker.ended = True
    if worker.ended and worker.number < worker.part.end:
        status = f"the process ended with status {worker.process.exitcode}"
        if not worker.started:
            raise RuntimeError(f"{worker.part.reader} does not read its sample: {status}")
        received.append(_fault(worker, Outcome.TRACEBACK, status))
    elif time.monotonic() - worker.since_s > worker.limit_s:
        worker.process.kill()
        worker.ended = True
        received.append(_fault(worker, Outcome.HANG, f"killed after {worker.limit_s:.0f} s"))
    return received


def _fault(worker: _Worker, outcome: Outcome, detail: str) -> Result:
    """The fault of the input that the worker is at, which it will not finish."""
    key = f"{worker.part.reader}:{worker.number}"
    worker.number += 1
    return Result(key, outcome, detail, time.monotonic() - worker.since_s)
