"""Notices at once that a script trains without DistributedDataParallel."""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import sys
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from autotune.errors import LaunchError
from runtime_rewriter.failures import NO_DDP_FIX

PATIENCE_STEPS = 8
"""Steps of optimizers before the script must have built its model."""


class StepsWithoutDdp:
    """Counts the steps of the process's optimizers until `stop`, when a model has been built.

    The hook raises `LaunchError` in the step that is one too many.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._handle = register_optimizer_step_post_hook(self._after_step)

    def stop(self) -> None:
        self._handle.remove()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._steps += 1
        if self._steps == PATIENCE_STEPS:
            self.stop()
            raise LaunchError(
                f"the script has made {self._steps} steps, but {_case(optimizer)}", anchor="no-ddp"
            )


def _case(optimizer: Optimizer) -> str:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    kinds = {type(parameter).__name__ for parameter in parameters}
    if "DTensor" in kinds or any(type(p.data).__name__ == "DTensor" for p in parameters):
        return (
            "its parameters are sharded (DTensor, as fully_shard of FSDP2 or tensor parallelism "
            f"makes them); autotune tunes replicated models: {NO_DDP_FIX}"
        )
    if "FlatParameter" in kinds or any(hasattr(p, "_is_flat_param") for p in parameters):
        return (
            "its parameters are sharded by FullyShardedDataParallel; autotune tunes replicated "
            f"models: {NO_DDP_FIX}"
        )
    if "deepspeed" in sys.modules:
        return (
            "DeepSpeed synchronizes its gradients; autotune tunes DistributedDataParallel: train "
            f"without DeepSpeed and {NO_DDP_FIX}"
        )
    if "horovod" in sys.modules:
        return (
            "no hvd.DistributedOptimizer was built for the first optimizer that stepped; autotune "
            "tunes its gradients, not calls of hvd.allreduce in the script"
        )
    return f"its model is not wrapped, so every rank trains alone; {NO_DDP_FIX}"
