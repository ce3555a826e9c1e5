"""The script of PyTorch: a timed module under `hvd.DistributedOptimizer`."""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import horovod.torch as hvd
import torch

from autotune.recordings.horovod_calls import HorovodCall
from autotune.workload import Workload
from benchmarks.horovod_ranks.script import LATENCY, probes_of
from benchmarks.horovod_ranks.timed_model import TimedModel, TimedUpdate
from runtime_rewriter.horovod.recording import HorovodLog

POLL_S = 1e-4


def prepare() -> None:
    torch.set_num_threads(1)


def barrier() -> None:
    hvd.barrier()


class TorchScript:
    """Implements `HorovodScript`."""

    def __init__(self, workload: Workload, case: dict[str, Any]) -> None:
        torch.manual_seed(hvd.rank())  # every rank touches other rows of tables
        self._model = TimedModel(workload)
        TimedUpdate.update_s = workload.update_s
        named = self._model.named_trainable()
        by_name = dict(named)
        groups = [[by_name[name] for name in group] for group in case["groups"]]
        self._optimizer: Any = hvd.DistributedOptimizer(
            TimedUpdate([parameter for _, parameter in named], lr=0.0),
            named_parameters=named,
            groups=groups or None,
            sparse_as_dense=case["sparse_as_dense"],
        )
        self._log = HorovodLog()

    @property
    def calls(self) -> list[HorovodCall]:
        return self._log.calls

    def logging(self) -> AbstractContextManager[None]:
        return self._log.watching()

    def step(self, number: int) -> list[float]:
        self._log.step = number
        self._optimizer.zero_grad()
        self._model().backward()
        for handle, _ in list(self._optimizer._handles.values()):
            for operation in operations_of(handle):
                await_quietly(operation)
        self._optimizer.step()
        return [*self._model.marks_s, time.perf_counter()]

    def probe(self, size_bytes: int) -> None:
        self._log.step = -1
        probes = [(torch.zeros(size_bytes // 4), *probe) for probe in probes_of(size_bytes)]
        hvd.barrier()
        handles = [
            hvd.allreduce_async_(tensor, name=name, postscale_factor=factor)
            for tensor, name, factor in probes
        ]
        for handle in handles:
            await_quietly(handle)
            hvd.synchronize(handle)

    def latency(self, number: int) -> None:
        self._log.step = -1
        handle = hvd.allreduce_async_(torch.zeros(1), name=f"{LATENCY}.{number}")
        await_quietly(handle)
        hvd.synchronize(handle)

    def largest(self, values: Sequence[float]) -> list[float]:
        of_all: list[float] = hvd.allreduce(
            torch.tensor(values, dtype=torch.float64), op=hvd.Max, name="times"
        ).tolist()
        return of_all


script = TorchScript


def operations_of(handle: Any) -> list[int]:
    """Return the handles of operations; those of a sparse gradient are in a function's closure."""
    if not callable(handle):
        return [handle]
    held = zip(handle.__code__.co_freevars, handle.__closure__, strict=True)
    return [cell.cell_contents for name, cell in held if name.endswith("_handle")]


def await_quietly(handle: int) -> None:
    """Wait as `synchronize` does, but asleep: its spinning would take the other ranks' cores."""
    while not hvd.poll(handle):
        time.sleep(POLL_S)
