"""Implements `autotune.apply` for an optimizer of `horovod.torch.DistributedOptimizer`."""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from torch import nn

from autotune.errors import InvalidInput
from runtime_rewriter.horovod.importing import replace_function
from runtime_rewriter.horovod.joining import check_join
from runtime_rewriter.horovod.modules import module_of
from runtime_rewriter.horovod.torch_scripts import check_optimizer, connection_of
from runtime_rewriter.horovod.torch_synchronizer import HorovodSynchronizer
from runtime_rewriter.horovod.versions import check_horovod
from runtime_rewriter.pytorch.exchange.ranks import Timeouts


def is_of_horovod(optimizer: object) -> bool:
    """Whether `hvd.DistributedOptimizer` returned the optimizer."""
    return "horovod.torch" in sys.modules and hasattr(optimizer, "_allreduce_delay")


def steered_synchronizer(optimizer: Any) -> HorovodSynchronizer | None:
    """The synchronizer that steers the optimizer already, as under `autotune tune` and `run`."""
    owner = getattr(optimizer.synchronize, "__self__", None)
    return owner if isinstance(owner, HorovodSynchronizer) else None


def attach_to_horovod(model: nn.Module, optimizer: Any, waits: Timeouts) -> HorovodSynchronizer:
    """Steer an optimizer in a script that no launcher of autotune started. Collective.

    Raises `InvalidInput` if `model` does not hold exactly the parameters that it updates.
    """
    horovod: Any = sys.modules["horovod.torch"]
    check_horovod(horovod, "PyTorch")
    if not horovod.is_initialized():
        raise InvalidInput("autotune.apply needs Horovod; call hvd.init() before it")
    check_optimizer(horovod, optimizer)
    parameters = optimizer._requires_update or optimizer._parameter_names
    if {id(p) for p in model.parameters() if p.requires_grad} != {id(p) for p in parameters}:
        fitting = type(module_of(parameters)).__name__
        raise InvalidInput(
            "autotune.apply needs the module whose trainable parameters hvd.DistributedOptimizer "
            f"updates, but got another {type(model).__name__}; pass that {fitting}"
        )
    connection = connection_of(horovod, waits, tuned=False)
    connection.adopt()
    synchronizer = HorovodSynchronizer(model, optimizer, horovod, connection, waits)
    operations = horovod.mpi_ops
    joining = wraps(operations.join)(partial(_join, operations.join, synchronizer))
    replace_function("horovod.torch", operations, "join", joining, synchronizer.at_close)
    return synchronizer


def _join(
    original: Callable[..., Any], synchronizer: HorovodSynchronizer, *args: Any, **kwargs: Any
) -> Any:
    """Implements `hvd.join`."""
    check_join(synchronizer)
    return original(*args, **kwargs)
