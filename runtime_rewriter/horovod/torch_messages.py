"""Messages of a plan as operations of Horovod."""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from runtime_rewriter.pytorch.exchange.device import Device
from runtime_rewriter.pytorch.exchange.lanes import Collective, Gather, Lanes
from runtime_rewriter.pytorch.exchange.ranks import RankGroups, SynchronizerGroups

SENT_BY_HOROVOD = (torch.float32, torch.float64, torch.float16)
"""Gradients of other dtypes (bfloat16, complex) are unknown to `horovod.torch`."""
_NUMBERS = itertools.count(1)
"""Of operations, the same on all ranks: plans are loaded together. No other plan of this process
uses the number, since Horovod would remember the order of its last execution."""
_POLL_S = 5e-5
"""Between looks at an operation: Horovod's own wait spins, and keeps a core from the other
ranks."""


class HorovodLanes(Lanes):
    """Lanes whose all-reduces and gathers of all ranks are operations of Horovod, one per message.
    A message of rows has two gathers, as Horovod's own sparse gradients have.

    `horovod` is the module `horovod.torch`. `limit_s`: see `stall_limit_s`.

    Horovod executes operations in the order in which they became ready on all ranks, and those that
    become ready in one cycle in the order of their last execution. Messages are enqueued in plan
    order from the first step on, so that is the plan's order. The other collectives, and groups in
    another order, use our process groups.
    """

    def __init__(
        self,
        horovod: Any,
        process_set: Any,
        limit_s: float | None,
        ranks: SynchronizerGroups,
        device: Device,
    ) -> None:
        super().__init__(ranks, device)
        self._timeout_s = min(ranks.timeout_s, limit_s or ranks.timeout_s)
        self._horovod, self._process_set = horovod, process_set
        self.sent_by_horovod = 0
        """All-reduces of the loaded plan that Horovod executes."""

    def all_reduce(self, values: Tensor, rank_groups: RankGroups) -> Collective:
        world = rank_groups == RankGroups.world(self.ranks.size)
        if not world or values.dtype not in SENT_BY_HOROVOD:
            return super().all_reduce(values, rank_groups)
        self.sent_by_horovod += 1
        name = _new_name()

        def reduce(group: dist.ProcessGroup) -> dist.Work | None:
            horovod = self._horovod
            handle = horovod.grouped_allreduce_async_(
                [values], name=name, op=horovod.Sum, process_set=self._process_set
            )
            return cast(dist.Work, _Operation(horovod, handle, self._timeout_s))

        return reduce

    def all_gather(self, rank_groups: RankGroups) -> Gather:
        if rank_groups != RankGroups.world(self.ranks.size):
            return super().all_gather(rank_groups)
        name = _new_name()

        def gather(received: Tensor, sent: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
            horovod = self._horovod
            handle = horovod.allgather_async(sent, name=name, process_set=self._process_set)
            operation = _Operation(horovod, handle, self.ranks.timeout_s, received.copy_)
            return cast(dist.Work, operation)

        return gather


def _new_name() -> str:
    return f"autotune.{next(_NUMBERS)}"


class _Operation:
    """An operation under way; the part of `dist.Work` that lanes use. Any thread may wait.

    `take` is called once with its result.
    """

    def __init__(
        self,
        horovod: Any,
        handle: int,
        timeout_s: float,
        take: Callable[[Any], object] = lambda _: None,
    ) -> None:
        self._take = take
        self._poll: Callable[[int], bool] = horovod.poll
        self._synchronize: Callable[[int], object] = horovod.synchronize
        self._handle = handle
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._ended = False

    def is_completed(self) -> bool:
        return self._ended or self._poll(self._handle)

    def wait(self) -> None:
        """Raises `RuntimeError` if it failed or takes too long."""
        with self._lock:
            if self._ended:
                return
            deadline_s = time.monotonic() + self._timeout_s
            while not self._poll(self._handle):
                if time.monotonic() > deadline_s:
                    raise RuntimeError(
                        f"timed out: Horovod did not complete it within {self._timeout_s:g} s"
                    )
                time.sleep(_POLL_S)
            self._ended = True
            self._take(self._synchronize(self._handle))  # raises what failed
