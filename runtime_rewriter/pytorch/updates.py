"""Updates of a script's optimizers, applied later and variable by variable.

An optimizer may update a variable from that variable, its gradient, its own state and the
hyperparameters alone. Its update then gives the same bits at any time between `step()` and the next
read. Unknown optimizers, and hooks around the step, may break this: see `coupling_reason`.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from runtime_rewriter.pytorch.optimizer_guard import attributes_of, plain_class

_WRAPPERS: WeakSet[type[Optimizer]] = WeakSet()
_OTHERS = ("LBFGS", "Optimizer")
PER_VARIABLE = frozenset(
    kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and name not in _OTHERS
)
"""torch's optimizers with per-variable updates: all but LBFGS."""
_STEPPING = ("step", "_init_group")
"""The methods by which they update."""


def note_wrapper(kind: type[Optimizer]) -> None:
    """Note that `kind.step` does no more for an update than to call the step of its base class."""
    _WRAPPERS.add(kind)


def updating_class(optimizer: Optimizer) -> Any:
    """Return the class whose `step` updates."""
    kind: Any = plain_class(optimizer)
    return kind.__base__ if kind in _WRAPPERS else kind


def coupling_reason(optimizer: Optimizer, own_hooks: Set[int] = frozenset()) -> str | None:
    """Why the variables of `optimizer` cannot be updated one by one; None if they can.

    `own_hooks`: ids of global step hooks that are harmless.
    """
    kind = updating_class(optimizer)
    if kind not in PER_VARIABLE:
        return (
            f"the optimizer {kind.__name__} may couple variables; torch's own optimizers except "
            "LBFGS update them one by one"
        )
    replaced = _replaced_methods(optimizer, kind) or _replaced_in_class(kind)
    if replaced:
        return (
            f"the script replaced {', '.join(replaced)} of its optimizer {kind.__name__}, which "
            "may couple variables"
        )
    global_hooks = {
        *torch_optimizer._global_optimizer_pre_hooks,
        *torch_optimizer._global_optimizer_post_hooks,
    } - own_hooks
    attributes = attributes_of(optimizer)
    if any(attributes.get(name) is not None for name in ("grad_scale", "found_inf")):
        return (
            f"the optimizer {kind.__name__} itself unscales gradients for GradScaler (fused=True), "
            "all at once"
        )
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks or global_hooks:
        return (
            f"hooks around the step of the optimizer {kind.__name__} may read all gradients at once"
        )
    return None


def _replaced_methods(optimizer: Optimizer, kind: type[Optimizer]) -> list[str]:
    """Methods that this instance has in place of its class's, other than by torch's schedulers,
    which only note that `step` was called."""
    replaced = []
    for name, value in attributes_of(optimizer).items():
        if callable(getattr(kind, name, None)):
            noted = getattr(value, "_wrapped_by_lr_sched", False)
            own_step: Any = plain_class(optimizer).step
            if not (name == "step" and noted and value.__wrapped__ is own_step):
                replaced.append(name)
    return replaced


def _replaced_in_class(kind: type[Optimizer]) -> list[str]:
    """Methods that the script has replaced in a class of torch's."""
    return [name for name in _STEPPING if not _is_of_torch(getattr(kind, name, None))]


def _is_of_torch(method: Any) -> bool:
    """Whether a method, and all that it wraps, was defined in torch's modules.

    A wrapper may bear the name and module of what it wraps, but has its own globals.
    """
    while method is not None:
        if not str(getattr(method, "__globals__", {}).get("__name__")).startswith("torch."):
            return False
        method = getattr(method, "__wrapped__", None)
    return True


class Averaged(NamedTuple):
    """A parameter and its averaged gradient, which its `.grad` need not be."""

    parameter: Parameter
    gradient: Tensor


@dataclass(frozen=True)
class DueUpdate:
    """A `step()` to apply later, with the hyperparameters of each parameter group at its call.

    `autocast`: device type, whether it was enabled, and its dtype.
    """

    optimizer: Optimizer
    hyperparameters: tuple[Mapping[str, Any], ...]
    autocast: tuple[str, bool, torch.dtype]

    @staticmethod
    def now(optimizer: Optimizer) -> DueUpdate:
        """Record the state at the script's call of `step()`."""
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        device = next(parameters).device.type
        groups = tuple(
            {name: _frozen(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        )
        return DueUpdate(
            optimizer,
            groups,
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)),
        )

    def apply(self, members: Mapping[int, list[Averaged]]) -> None:
        """Update only `members`, by the number of their parameter group.

        torch's own step runs on stand-ins: tensors on the same memory, in an optimizer with the
        same attributes. Until it ends, the parameters and the script's optimizer can so be watched,
        and other threads that read them wait.
        """
        attributes = attributes_of(self.optimizer)
        states = attributes["state"]
        stand_ins = {one.parameter: _stand_in(one) for chosen in members.values() for one in chosen}
        kind = updating_class(self.optimizer)
        stepping: Any = kind.__new__(kind)
        stepping.__dict__ = {
            **attributes,
            "param_groups": [
                {
                    **self.hyperparameters[number],
                    "params": [stand_ins[one.parameter] for one in chosen],
                }
                for number, chosen in sorted(members.items())
            ],
            "state": defaultdict(
                dict, {stand_in: states[p] for p, stand_in in stand_ins.items() if p in states}
            ),
        }
        with self.modes():
            unhooked_step(kind)(stepping)
        for parameter, stand_in in stand_ins.items():
            if stand_in in stepping.state:
                states[parameter] = stepping.state[stand_in]

    @contextmanager
    def modes(self) -> Iterator[None]:
        """The modes of the script's own step, whatever mode the code that reads now is in."""
        device, enabled, dtype = self.autocast
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(device, dtype, enabled):
            yield


def apply_in_turns(
    due_updates: Mapping[int, Sequence[tuple[DueUpdate, int]]], averaged: Mapping[int, Averaged]
) -> None:
    """Apply updates in the order of the script's steps, those of one step together.

    `due_updates`: those of each parameter, each with the number of the parameter's group.
    """
    of_turn: dict[int, tuple[DueUpdate, dict[int, list[Averaged]]]] = {}
    longest = max(len(of_variable) for of_variable in due_updates.values())
    for turn in range(longest):
        for position, of_variable in due_updates.items():
            if turn < len(of_variable):
                update, group = of_variable[turn]
                members = of_turn.setdefault(id(update), (update, {}))[1]
                members.setdefault(group, []).append(averaged[position])
        for update, members in of_turn.values():
            update.apply(members)
        of_turn.clear()


def _stand_in(averaged: Averaged) -> Tensor:
    """A tensor on the memory of the parameter, with the averaged gradient."""
    stand_in = averaged.parameter.detach()
    stand_in.grad = averaged.gradient.detach()
    return stand_in


def _frozen(value: Any) -> Any:
    """A copy of a hyperparameter, which a script may change in place."""
    if isinstance(value, Tensor):
        return value.clone()
    return (
        type(value)(_frozen(inner) for inner in value) if isinstance(value, tuple | list) else value
    )


def unhooked_step(kind: type[Optimizer]) -> Callable[[Optimizer], object]:
    """`step` without the profiler and the hooks that torch wraps around it."""
    step: Any = kind.step
    unhooked: Callable[[Optimizer], object] = (
        step.__wrapped__ if getattr(step, "hooked", False) else step
    )
    return unhooked


def group_numbers(optimizer: Optimizer) -> dict[int, int]:
    """Identity of a parameter -> number of its group."""
    return {
        id(parameter): number
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
