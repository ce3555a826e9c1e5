"""Sends the messages of a plan by operations of `horovod.tensorflow`.

Horovod names an operation by its node, and an eager operation has none. So each message has a
`tf.function` of its own, which a thread of ours calls: the operation waits in no thread of
TensorFlow.
"""

# mypy: untyped-calls-exclude=torch, allow-untyped-calls

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import Any, cast

import tensorflow as tf
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import dlpack

from runtime_rewriter.pytorch.exchange.device import Device
from runtime_rewriter.pytorch.exchange.lanes import Collective, Lanes
from runtime_rewriter.pytorch.exchange.ranks import RankGroups, SynchronizerGroups

SENT_BY_HOROVOD = (torch.float32, torch.float64, torch.float16)
MOST_UNDER_WAY = 256
"""Each operation under way has a thread, which sleeps."""


class TensorflowLanes(Lanes):
    """Lanes whose all-reduces of all ranks are operations of Horovod, one per message.

    `horovod` is the module `horovod.tensorflow`. Messages are enqueued in plan order: each begins
    when the one before it has begun, and in its first step, when that is complete. Horovod executes
    operations in the order in which they became ready on all ranks, and those that become ready in
    one cycle in the order of their last execution. TensorFlow does not tell when it has enqueued an
    operation, so on a busy machine two of them may change places; all ranks still execute them in
    one order. The other collectives, and groups in another order, use our process groups.
    """

    def __init__(
        self, horovod: Any, process_set: Any, ranks: SynchronizerGroups, device: Device
    ) -> None:
        super().__init__(ranks, device)
        self._horovod, self._process_set = horovod, process_set
        self._operations = 0
        self._threads_of_messages = ThreadPoolExecutor(MOST_UNDER_WAY, "horovod-message")
        self._last: _Operation | None = None

    def all_reduce(self, values: Tensor, rank_groups: RankGroups) -> Collective:
        world = rank_groups == RankGroups.world(self.ranks.size)
        if not world or values.dtype not in SENT_BY_HOROVOD:
            return super().all_reduce(values, rank_groups)
        self._operations += 1  # the same on all ranks: plans are loaded together
        message = _Message(self._horovod, self._process_set, f"autotune.{self._operations}", values)

        def reduce(group: dist.ProcessGroup) -> dist.Work | None:
            operation = _Operation(message, self._last, self.ranks.timeout_s)
            operation.completed = self._threads_of_messages.submit(operation.run)
            self._last = operation
            return cast(dist.Work, operation)

        return reduce

    def close(self) -> None:
        super().close()
        self._threads_of_messages.shutdown(wait=False, cancel_futures=True)


class _Message:
    """The all-reduce of one buffer."""

    def __init__(self, horovod: Any, process_set: Any, name: str, values: Tensor) -> None:
        self.values = values
        self.sent_before = False

        def reduced(packed: Any) -> Any:
            (total,) = horovod.grouped_allreduce(
                [packed], name=name, op=horovod.Sum, process_set=process_set
            )
            return total

        dtype = tf.as_dtype(str(values.dtype).removeprefix("torch."))
        with tf.init_scope(), tf.device("CPU:0"):
            self.reduce = tf.function(reduced, autograph=False).get_concrete_function(
                tf.TensorSpec(tuple(values.shape), dtype)
            )


class _Operation:
    """A message under way; the part of `dist.Work` that lanes use. Any thread may wait."""

    def __init__(self, message: _Message, before: _Operation | None, timeout_s: float) -> None:
        self._message, self._before, self._timeout_s = message, before, timeout_s
        self._begun = Event()
        self.completed: Future[None]

    def run(self) -> None:
        message, before = self._message, self._before
        self._before = None  # else all operations would stay alive
        try:
            packed = tf.experimental.dlpack.from_dlpack(dlpack.to_dlpack(message.values))
            if before is not None:
                if not before._begun.wait(self._timeout_s):
                    # Sent now, it would be out of the order that the other ranks keep.
                    raise RuntimeError(
                        "timed out: the message before it did not begin within "
                        f"{self._timeout_s:g} s"
                    )
                if not message.sent_before:
                    before.wait()
        finally:
            self._begun.set()
        message.sent_before = True
        total = message.reduce(packed)
        with torch.no_grad():
            message.values.copy_(dlpack.from_dlpack(tf.experimental.dlpack.to_dlpack(total)))

    def is_completed(self) -> bool:
        return self.completed.done()

    def wait(self) -> None:
        """Raises `RuntimeError` if it failed or takes too long."""
        try:
            self.completed.result(self._timeout_s)
        except TimeoutError as error:
            raise RuntimeError(
                f"timed out: Horovod did not complete it within {self._timeout_s:g} s"
            ) from error
        except tf.errors.OpError as error:
            raise RuntimeError(error.message) from error
