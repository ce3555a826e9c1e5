"""Plans for the optimizer that `horovod.torch.DistributedOptimizer` returns.

Horovod's hooks count the backward passes of each parameter. Without a plan they enqueue an
operation, and `synchronize`, which `step` calls, waits for all. With a plan they report the ready
gradient to us, and `synchronize` ends our pass: nothing of Horovod's own is enqueued. If the plan
crosses the step, it leaves messages and updates to `cross_step`. A parameter
without a gradient counts as zeros, and its `.grad` is written on all ranks, as Horovod does it.
"""

# mypy: untyped-calls-exclude=torch, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from autotune.errors import InvalidInput, SynchronizationError
from autotune.strategy_space.plan import Plan
from autotune.workload import Library
from runtime_rewriter.horovod.connection import HorovodConnection
from runtime_rewriter.horovod.torch_messages import HorovodLanes
from runtime_rewriter.pytorch.attached import HookedSynchronizer
from runtime_rewriter.pytorch.exchange.ranks import Timeouts
from runtime_rewriter.pytorch.updates import note_wrapper

_UNDER_WAY = object()
"""Stands for the handle of an operation: Horovod refuses `zero_grad` while it has one."""


class HorovodSynchronizer(HookedSynchronizer):
    """The synchronizer of the module whose parameters `optimizer` updates.

    `horovod` is the module `horovod.torch`. Building one is collective over the optimizer's process
    set.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Any,
        horovod: Any,
        connection: HorovodConnection,
        waits: Timeouts,
    ) -> None:
        self._horovod, self._optimizer, self._connection = horovod, optimizer, connection
        self._own_groups = optimizer._groups
        self._called = False  # the module, in a forward pass with gradients
        with connection.world.as_default():
            super().__init__(
                module,
                timeout_s=waits.message_s,
                agreement_timeout_s=waits.agreement_s,
                refusal_reason=self._refusal_reason,
                on_byte_scale=_no_byte_scale,
                lanes=partial(
                    HorovodLanes, horovod, optimizer.process_set, connection.stalls.limit_s
                ),
                summed=optimizer.op == horovod.Sum,
                unused_as_zeros=True,
            )
        self.library = Library.HOROVOD
        self.world = connection.world.as_default
        self.cross_step.outer = optimizer
        self.cross_step.conditions.script.norms_are_reads = True
        note_wrapper(type(optimizer))
        self.at_close = ExitStack()
        self._own_synchronize = optimizer.synchronize
        optimizer.synchronize = self._synchronize

    def _refusal_reason(self) -> str | None:
        operation = self._optimizer.op
        if operation not in (self._horovod.Average, self._horovod.Sum):
            return "the optimizer was built with an op other than hvd.Average and hvd.Sum"
        return None

    def load(self, plan: Plan | None, *, deferred: bool = False) -> None:
        with self._connection.world.as_default():
            super().load(plan, deferred=deferred)

    @property
    def restarts(self) -> int:
        return self._connection.restarts

    def close(self) -> None:
        with self._connection.world.as_default():
            super().close()
        self.at_close.close()
        vars(self._optimizer).pop("synchronize", None)

    # -- the optimizer

    def _hook(self) -> None:
        optimizer = self._optimizer
        optimizer._allreduce_grad_async = self._ready
        optimizer._groups = None  # its hooks then report each parameter by itself

    def _unhook(self) -> None:
        super()._unhook()
        vars(self._optimizer).pop("_allreduce_grad_async", None)
        self._optimizer._groups = self._own_groups

    def _ready(self, parameter: torch.Tensor) -> tuple[object, None]:
        """Called by Horovod's hook when a parameter has had its last backward pass of the step."""
        with self._lock, torch.no_grad() if torch.is_grad_enabled() else nullcontext():
            try:
                if not self._begun:
                    self._begin()
                self._pass.ready(self._position_of(parameter))
            except SynchronizationError as error:
                self._broken = str(error)
                raise
        return _UNDER_WAY, None

    def _position_of(self, parameter: torch.Tensor) -> int:
        position = self.index_of(parameter)
        assert position is not None, "the module has exactly the optimizer's parameters"
        return position

    def _synchronize(self) -> None:
        """Implements `optimizer.synchronize()`, which `step` calls."""
        self._check_called()
        if self._plan is None:
            self._own_synchronize()
            self._begun = self._armed = False
            self._end_backward()
        else:
            self._finish()
            optimizer = self._optimizer
            for parameter in optimizer._allreduce_delay:
                optimizer._allreduce_delay[parameter] = optimizer.backward_passes_per_step
            optimizer._handles.clear()
            optimizer._synchronized = True

    def _check_called(self) -> None:
        """Raise `InvalidInput` in the second step of a script that never calls the module."""
        second_step = self.boundaries.due and not self._optimizer._synchronized
        if second_step and self.listeners and not self._called:
            raise InvalidInput(
                "a training step must call the module that holds the optimizer's parameters "
                f"({type(self.module).__name__}), but two steps called only its methods, its "
                ".forward or its parts; call it itself, as model(x) (a class that only holds the "
                "trained module should not be an nn.Module)"
            )

    def _finish(self) -> None:
        self._check_usable()
        if not self._begun:  # no parameter had a gradient
            with torch.no_grad():
                self._begin()
        super()._finish()

    # -- passes

    @property
    def _last_pass(self) -> bool:
        """Whether the next backward pass is the last one before `step`."""
        return any(passes <= 1 for passes in self._optimizer._allreduce_delay.values())

    def _end_last_pass(self) -> None:
        """A script may compute several forward passes, or evaluate, before it synchronizes."""

    def _begin(self) -> None:
        self.cross_step.flush()  # a second backward pass of one forward pass fills buffers, too
        self._begun = True
        if self._plan is not None:
            self._pass.begin(())

    def _before(self, module: nn.Module, inputs: object) -> None:
        if not torch.is_grad_enabled():
            self.before_evaluation()
            return
        self._called = True
        with self._connection.world.as_default() if self.boundaries.due else nullcontext():
            self.before_forward(self._last_pass)
        self.forward_starts()

    def _after(self, module: nn.Module, inputs: object, output: object) -> None:
        if torch.is_grad_enabled():
            self.after_forward(output)


def _no_byte_scale(byte_scale: float) -> None:
    if byte_scale != 1:
        raise InvalidInput(
            "a byte scale cannot be used with Horovod, whose own operations send whole gradients; "
            "leave out --byte-scale"
        )
