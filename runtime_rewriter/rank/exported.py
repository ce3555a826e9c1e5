"""Checks an exported strategy against the model of a training process, and enacts it."""

from __future__ import annotations

import logging
from pathlib import Path

from torch import nn

from autotune.export import Export, check_model, read_export
from autotune.strategy_space.plan import Plan
from runtime_rewriter.pytorch.agreement import trainable_parameters
from runtime_rewriter.pytorch.exchange.ranks import TRAINING_TIMEOUTS
from runtime_rewriter.pytorch.hooks import GradientSynchronizer

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


class ExportSession:
    """Applies one export to the first model that a launched script builds."""

    timeouts = TRAINING_TIMEOUTS

    def __init__(self, path: Path) -> None:
        self.export = read_export(path)
        self._applied = False

    def model_built(self, synchronizer: GradientSynchronizer) -> None:
        """Load the export's plan into the first model; further models keep theirs."""
        if self._applied:
            return
        self._applied = True
        plan, notes = plan_for(self.export, synchronizer.module, synchronizer.ranks.size)
        # Also if nothing changes: the plans of all ranks are compared.
        synchronizer.load(plan or synchronizer.plan)
        if synchronizer.ranks.rank == 0:
            for note in notes:
                _log.warning("%s", note)
