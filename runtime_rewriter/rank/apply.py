"""Implements `autotune.apply(model, optimizer, strategy)`, the one line in a training script."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autotune.errors import InvalidInput
from autotune.export import read_export
from autotune.strategy_space.backend import backend_text
from autotune.strategy_space.builders.collectives import ddp_default
from autotune.strategy_space.plan import Plan
from autotune.strategy_space.plan import plan as planned
from runtime_rewriter.active import current_session
from runtime_rewriter.horovod.torch_apply import (
    attach_to_horovod,
    is_of_horovod,
    steered_synchronizer,
)
from runtime_rewriter.pytorch.agreement import assumed_workload
from runtime_rewriter.pytorch.attached import attach
from runtime_rewriter.pytorch.exchange.ranks import TRAINING_TIMEOUTS
from runtime_rewriter.pytorch.hooks import GradientSynchronizer
from runtime_rewriter.rank.exported import plan_for

_log = logging.getLogger("autotune")


@dataclass(frozen=True)
class Applied:
    """The result of `autotune.apply`.

    `notes`: the plan's backend, and parts that were not applied.
    """

    synchronizer: GradientSynchronizer
    notes: tuple[str, ...]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without synchronizing them, as DDP's `no_sync`."""
        with self.synchronizer.no_sync():
            yield

    def compression_state(self) -> dict[str, Any]:
        """Error-feedback residuals of this rank, to save with the model and the optimizer.

        Every rank has its own; call this between two steps:
        `torch.save(applied.compression_state(), f"compression-{rank}.pt")`. The state is safe for
        `torch.load(weights_only=True)`. It is at most as large as the model, and has no tensors
        without compression.
        """
        self.synchronizer.cross_step.flush()
        return self.synchronizer.residuals.state_dict()

    def load_compression_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `compression_state` of this rank. Collective, between two steps.

        Without it the residuals start from zero. A restart then loses unsent gradients, about one
        step's small ones. Raises `InvalidInput` for the state of another rank, world or model.
        """
        self.synchronizer.cross_step.flush()
        self.synchronizer.residuals.load_state_dict(state)
        if self.synchronizer.native is not None:  # residuals can only travel in our own messages
            self.synchronizer.load(self.synchronizer.plan)


def apply(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    strategy: str | Path | None = None,
    find_unused_parameters: bool = False,
) -> Applied:
    """See `autotune.apply`."""
    if isinstance(model, DistributedDataParallel):
        raise InvalidInput(
            "autotune.apply needs the bare model, but got one that DistributedDataParallel wraps "
            "already; pass model.module and drop the wrapper, or leave the script as it is and use "
            "`autotune run --strategy best.json -- torchrun ...`"
        )
    if is_of_horovod(optimizer):
        return _apply_to_horovod(model, optimizer, strategy)
    if not (dist.is_available() and dist.is_initialized()):
        raise InvalidInput(
            "autotune.apply needs the process group; call torch.distributed.init_process_group "
            "before it, or pass the optimizer of hvd.DistributedOptimizer"
        )
    session = current_session()
    waits = TRAINING_TIMEOUTS if session is None else session.timeouts
    plan, notes = _requested_plan(model, strategy, steered=session is not None)
    synchronizer = attach(
        model,
        plan,
        timeout_s=waits.message_s,
        agreement_timeout_s=waits.agreement_s,
        find_unused_parameters=find_unused_parameters,
    )
    if session is not None:
        session.model_built(synchronizer)
    return _applied(synchronizer, (*notes, *_unsynchronized(model, optimizer)))


def _apply_to_horovod(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, strategy: str | Path | None
) -> Applied:
    """Without a strategy Horovod's own operations stay."""
    steered = steered_synchronizer(optimizer)
    if steered is not None:
        unused = () if strategy is None else (f"{strategy} is not used: the launcher chooses",)
        _warn(steered, unused)
        return Applied(steered, unused)
    export = None if strategy is None else read_export(Path(strategy))
    synchronizer = attach_to_horovod(model, optimizer, TRAINING_TIMEOUTS)
    if export is None:
        return Applied(synchronizer, ())
    plan, notes = plan_for(export, model, synchronizer.ranks.size)
    synchronizer.load(plan)
    return _applied(synchronizer, notes)


def _applied(synchronizer: GradientSynchronizer, notes: tuple[str, ...]) -> Applied:
    """Log `notes` of what was not applied: scripts may drop the result."""
    _warn(synchronizer, notes)
    return Applied(synchronizer, (*notes, *_backend(synchronizer)))


def _warn(synchronizer: GradientSynchronizer, notes: tuple[str, ...]) -> None:
    if synchronizer.ranks.rank == 0:
        for note in notes:
            _log.warning("%s", note)


def _requested_plan(
    model: nn.Module, strategy: str | Path | None, steered: bool
) -> tuple[Plan, tuple[str, ...]]:
    """The plan that the script requests, and notes for people.

    If `steered`, a tuner only compares with this plan, or `autotune run` replaces it. An export
    that is missing, or of another model, world size or version, is then left out with a note.
    """
    if strategy is None:
        return _ddp_plan(model), ()
    try:
        chosen, notes = plan_for(read_export(Path(strategy)), model, dist.get_world_size())
    except InvalidInput as unusable:
        if not steered:
            raise
        return _ddp_plan(model), (
            f"{strategy} is not used, so the gradients are sent as torch's DDP would: {unusable}",
        )
    return chosen or _ddp_plan(model), notes


def _ddp_plan(model: nn.Module) -> Plan:
    """The plan of torch's DDP: its default buckets, in the order in which it expects gradients."""
    workload = assumed_workload(model)
    return planned(ddp_default(workload), workload, dist.get_world_size())


def _backend(synchronizer: GradientSynchronizer) -> tuple[str, ...]:
    plan = synchronizer.plan
    if plan is None:
        return ()
    native = synchronizer.native is not None
    return (f"{plan.id} is {backend_text(plan, native, synchronizer.library)}",)


def _unsynchronized(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[str, ...]:
    """Note parameters of the optimizer outside the model: they would drift apart between ranks."""
    if optimizer is None:
        return ()
    owned = {id(parameter) for parameter in model.parameters()}
    foreign = sum(
        id(parameter) not in owned
        for group in optimizer.param_groups
        for parameter in group["params"]
    )
    if foreign == 0:
        return ()
    return (
        f"{foreign} parameters of the optimizer do not belong to the model and are not "
        "synchronized",
    )
