"""Checks an exported strategy against the model of a training process, and enacts it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

from torch import nn

from autotune.errors import AutotuneError, LaunchError, PlanMismatch
from autotune.export import Export, check_model, read_export
from autotune.strategy_space.backend import backend_text
from autotune.strategy_space.plan import Plan
from runtime_rewriter.pytorch.agreement import trainable_parameters
from runtime_rewriter.pytorch.exchange.ranks import TRAINING_TIMEOUTS
from runtime_rewriter.pytorch.hooks import GradientSynchronizer
from runtime_rewriter.rank.without_ddp import StepsWithoutDdp
from runtime_rewriter.rendezvous import Peers

_log = logging.getLogger("autotune")


def plan_for(
    export: Export, model: nn.Module, world_size: int
) -> tuple[Plan | None, tuple[str, ...]]:
    """The plan to load (None: the current setup) and notes for people; raises `ModelMismatch`."""
    named = trainable_parameters(model)
    variables = {
        name: (tuple(p.shape), str(p.dtype).removeprefix("torch.")) for name, p in named.items()
    }
    check_model(export, variables, world_size)
    if export.strategy is None:
        return None, ("the export keeps the current setup as the fastest: nothing was changed",)
    return export.plan(), ()


def agree_on_plan(
    peers: Peers, read: Callable[[], Export | None], timeout_s: float
) -> Export | None:
    """Return the export that `read` gives this rank; None is the current setup. Collective.

    For ranks of TensorFlow, which have no process group. Raises `PlanMismatch` on every rank if
    their plans differ. What `read` raises on one rank is a `LaunchError` on the others.
    """
    try:
        export = read()
        plan = None if export is None else export.plan()
    except AutotuneError as error:
        with contextlib.suppress(LaunchError):
            peers.agree({"problem": f"rank {peers.rank}: {error}"}, lambda _: {}, timeout_s)
        raise
    held = {"plan": "no plan" if plan is None else plan.id}
    plans: list[str] = peers.agree(
        held, lambda ranks: {"plans": [one["plan"] for one in ranks]}, timeout_s
    )["plans"]
    if len(set(plans)) > 1:
        listed = ", ".join(f"rank {rank} holds {plan_id}" for rank, plan_id in enumerate(plans))
        raise PlanMismatch(
            f"every rank must hold the same plan, but {listed}; give all ranks the same export"
        )
    return export


class ExportSession:
    """Applies one export to the first model that a launched script builds.

    `report`: a file of `autotune run`, to which each rank of its machine adds the backend of its
    model.
    """

    timeouts = TRAINING_TIMEOUTS

    def __init__(self, path: Path, report: Path | None = None) -> None:
        self.export = read_export(path)
        self._report = report
        self._models = 0
        self._without_ddp: StepsWithoutDdp | None = None

    def require_model(self) -> None:
        """From now on, end the process once it trains without a model that can take the export."""
        self._without_ddp = StepsWithoutDdp()

    def model_built(self, synchronizer: GradientSynchronizer) -> None:
        """Load the export's plan into the first model; further models keep theirs."""
        self._models += 1
        if self._without_ddp is not None:
            self._without_ddp.stop()
        if self._models > 1:
            if synchronizer.ranks.rank == 0:
                _log.warning(
                    "the strategy is of the script's first DDP model; model %d keeps its own "
                    "synchronization",
                    self._models,
                )
            return
        plan, notes = plan_for(self.export, synchronizer.module, synchronizer.ranks.size)
        # Also if nothing changes: the plans of all ranks are compared.
        synchronizer.load(plan or synchronizer.plan)
        native = synchronizer.native is not None
        self._applied("" if plan is None else backend_text(plan, native, synchronizer.library))
        if synchronizer.ranks.rank == 0:
            for note in notes:
                _log.warning("%s", note)

    def applied_in_graph(self) -> None:
        """Note that a step of TensorFlow trains by the export."""
        plan = self.export.plan()
        count = 0 if plan is None else len(plan.messages)
        messages = f"{count} message{'' if count == 1 else 's'}"
        self._applied("" if plan is None else f"carried out by TensorFlow, {messages}")

    def _applied(self, backend: str) -> None:
        if self._report is None:
            return
        with contextlib.suppress(OSError):  # `autotune run` is on another machine, or gone
            descriptor = os.open(self._report, os.O_WRONLY | os.O_APPEND)
            with os.fdopen(descriptor, "a", encoding="utf-8") as report:
                report.write(f"{backend}\n")
