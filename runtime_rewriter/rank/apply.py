"""`autotune.apply(model, optimizer, strategy)`: the one line in a training script."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autotune.errors import InvalidInput, ModelMismatch
from autotune.export import read_export
from autotune.strategy_space.backend import backend_text
from autotune.strategy_space.builders.collectives import ddp_default
from autotune.strategy_space.plan import Plan
from autotune.strategy_space.plan import plan as planned
from runtime_rewriter.active import current_session
from runtime_rewriter.pytorch.agreement import assumed_workload
from runtime_rewriter.pytorch.attached import attach
from runtime_rewriter.pytorch.exchange.ranks import TRAINING_TIMEOUTS
from runtime_rewriter.pytorch.hooks import GradientSynchronizer
from runtime_rewriter.rank.exported import plan_for


@dataclass(frozen=True)
class Applied:
    """What was applied. `notes` says what could not be honoured, if anything, and who carries the plan out."""

    synchronizer: GradientSynchronizer
    notes: tuple[str, ...]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside accumulate gradients without synchronizing them, as DDP's `no_sync`."""
        with self.synchronizer.no_sync():
            yield

    def compression_state(self) -> dict[str, Any]:
        """What this rank holds back for later steps (int8, top_k, power_sgd): save it with the model's and the optimizer's state.

        Every rank has its own, between two steps: `torch.save(applied.compression_state(), f"compression-{rank}.pt")`. It is
        safe for `torch.load(weights_only=True)`, has the size of the model at most, and holds no tensors where nothing is compressed.
        """
        self.synchronizer.cross_step.flush()
        return self.synchronizer.residuals.state_dict()

    def load_compression_state(self, state: Mapping[str, Any]) -> None:
        """Carry on from what `compression_state` gave on this rank; every rank, between two steps.

        Without it the residuals start from zero: a restart loses what had not been sent, about one step's small gradients.
        Raises `InvalidInput` where the state is another rank's, another world's or another model's.
        """
        self.synchronizer.cross_step.flush()
        self.synchronizer.residuals.load_state_dict(state)


def apply(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    strategy: str | Path | None = None,
) -> Applied:
    """See `autotune.apply`."""
    if isinstance(model, DistributedDataParallel):
        raise InvalidInput(
            "autotune.apply needs the bare model, but got one that DistributedDataParallel wraps already; pass model.module and drop "
            "the wrapper, or leave the script as it is and use `autotune run --strategy best.json -- torchrun ...`"
        )
    if not (dist.is_available() and dist.is_initialized()):
        raise InvalidInput(
            "autotune.apply needs the process group; call torch.distributed.init_process_group before it"
        )
    session = current_session()
    waits = TRAINING_TIMEOUTS if session is None else session.timeouts
    plan, notes = _scripts_own_plan(model, strategy, steered=session is not None)
    synchronizer = attach(
        model, plan, timeout_s=waits.message_s, agreement_timeout_s=waits.agreement_s
    )
    if session is not None:
        session.model_built(synchronizer)
    return Applied(
        synchronizer, (*notes, *_unsynchronized(model, optimizer), *_carrier(synchronizer))
    )


def _scripts_own_plan(
    model: nn.Module, strategy: str | Path | None, steered: bool
) -> tuple[Plan, tuple[str, ...]]:
    """What the script asks for, and what of it cannot be honoured.

    `steered`: this is only what a tuner compares with, or what `autotune run` replaces, so an export that was
    made for another model or world size is left out with a note.
    """
    if strategy is None:
        return _ddp_plan(model), ()
    try:
        chosen, notes = plan_for(read_export(Path(strategy)), model, dist.get_world_size())
    except ModelMismatch as mismatch:
        if not steered:
            raise
        return _ddp_plan(model), (
            f"{strategy} does not fit, so the gradients are sent as torch's DDP would: {mismatch}",
        )
    return chosen or _ddp_plan(model), notes


def _ddp_plan(model: nn.Module) -> Plan:
    """What torch's DDP would send: its default buckets, in the order in which it expects the gradients."""
    workload = assumed_workload(model)
    return planned(ddp_default(workload), workload, dist.get_world_size())


def _carrier(synchronizer: GradientSynchronizer) -> tuple[str, ...]:
    held = synchronizer.plan
    return (
        ()
        if held is None
        else (f"{held.id} is {backend_text(held, synchronizer.native is not None)}",)
    )


def _unsynchronized(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[str, ...]:
    """A parameter that the optimizer updates but the model does not own would drift apart between the ranks."""
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
        f"{foreign} parameters of the optimizer do not belong to the model and are not synchronized",
    )
