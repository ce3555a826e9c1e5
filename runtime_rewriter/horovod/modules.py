"""Finds the module that an optimizer updates, which Horovod is never given."""

from __future__ import annotations

import gc
from collections.abc import Collection

from torch import Tensor, nn

from autotune.errors import InvalidInput

_FIX = (
    "build one nn.Module of all parameters that the optimizer updates, set requires_grad=False for "
    "the others, and call that module in the training step"
)


def module_of(parameters: Collection[Tensor]) -> nn.Module:
    """The outermost live module whose trainable parameters are exactly these.

    Raises `InvalidInput` if there is none or several.
    """
    wanted = {id(parameter) for parameter in parameters}
    fitting = [module for module in _live_modules() if _trainable(module) == wanted]
    inner = {id(part) for module in fitting for part in module.modules() if part is not module}
    outermost = [module for module in fitting if id(module) not in inner]
    if len(outermost) == 1:
        return outermost[0]
    if outermost:
        kinds = ", ".join(sorted(type(module).__name__ for module in outermost))
        raise InvalidInput(
            f"one module must hold the {len(wanted)} parameters of hvd.DistributedOptimizer, but "
            f"{len(outermost)} do ({kinds}); {_FIX}"
        )
    raise InvalidInput(
        f"a module must hold exactly the {len(wanted)} parameters of hvd.DistributedOptimizer, but "
        f"{_closest(wanted)}; {_FIX}"
    )


def _live_modules() -> list[nn.Module]:
    # Not isinstance: it asks an object for its class, which runs code of lazy objects.
    return [found for found in gc.get_objects() if issubclass(type(found), nn.Module)]


def _trainable(module: nn.Module) -> set[int]:
    return {id(parameter) for parameter in module.parameters() if parameter.requires_grad}


def _closest(wanted: set[int]) -> str:
    for module in _live_modules():
        trainable = _trainable(module)
        if wanted < trainable:
            return f"{type(module).__name__} has {len(trainable)}"
    return "none has all of them"
