"""Residuals of a script that scales its losses by `torch.amp.GradScaler`.

| symbol | meaning |
|---|---|
| S, S' | the scale of a step and of the next one |
| e_r, e'_r | residual of a variable on rank r before and after the backward pass of the step |

Gradients are S times those of the unscaled loss, and so are residuals. When the scaler changes the
scale, they are multiplied by S' / S. A step that it skips has applied nothing of what it sent, so
its residuals go back from e'_r to e_r. All ranks see the same averages, and so skip the same steps.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import wraps
from typing import Any
from weakref import WeakSet

from torch.amp import GradScaler
from torch.nn import Parameter
from torch.optim import Optimizer

from runtime_rewriter.pytorch.exchange.residuals import Residuals

_PRESENT: WeakSet[LossScales] = WeakSet()
_OWN: dict[str, Any] = {}
"""Methods of `GradScaler` that are replaced while any object is present."""


class LossScales:
    """Lets the residuals of one synchronizer follow the scalers that step its parameters.

    `flush` waits for messages under way, which change residuals until they have arrived.
    """

    def __init__(
        self, parameters: Mapping[str, Parameter], residuals: Residuals, flush: Callable[[], None]
    ) -> None:
        self._name_of = {id(parameter): name for name, parameter in parameters.items()}
        self._residuals, self._flush = residuals, flush
        self._scalers: WeakSet[GradScaler] = WeakSet()
        self.scaled = False
        """Whether a loss has been scaled in this process."""
        _PRESENT.add(self)
        if not _OWN:
            for name, replacement in _REPLACEMENTS.items():
                _OWN[name] = getattr(GradScaler, name)
                setattr(GradScaler, name, replacement(_OWN[name]))

    def close(self) -> None:
        """Give the scalers their own methods back, if no other synchronizer needs to know."""
        _PRESENT.discard(self)
        if not _PRESENT:
            for name, own in _OWN.items():
                setattr(GradScaler, name, own)
            _OWN.clear()

    def pass_begins(self) -> None:
        """Call before a backward pass packs its first gradient, with nothing under way."""
        if self.scaled and self._residuals.in_use:
            self._residuals.copy_for_skip()

    def variables_of(self, optimizer: Optimizer) -> list[str]:
        """The variables that `optimizer` updates; none while there are no residuals."""
        if not self._residuals.in_use:
            return []
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        return [self._name_of[id(p)] for p in parameters if id(p) in self._name_of]

    def step_ended(self, scaler: GradScaler, variables: Collection[str], skipped: bool) -> None:
        """Follow `scaler`, which has called `step()` of the optimizer of `variables`, or not."""
        self._scalers.add(scaler)
        if skipped:
            self._flush()
        self._residuals.step_ended(variables, skipped)

    def follows(self, scaler: GradScaler) -> bool:
        return self._residuals.in_use and scaler in self._scalers

    def scale_changed(self, factor: float) -> None:
        """Call when the scale was multiplied by `factor`."""
        self._flush()
        self._residuals.multiply(factor)


def _scale(own: Any) -> Any:
    @wraps(own)
    def scale(scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
        if scaler.is_enabled():
            for present in tuple(_PRESENT):
                present.scaled = True
        return own(scaler, *args, **kwargs)

    return scale


def _step(own: Any) -> Any:
    @wraps(own)
    def step(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        variables = {present: present.variables_of(optimizer) for present in tuple(_PRESENT)}
        result = own(scaler, optimizer, *args, **kwargs)
        concerned = {present: names for present, names in variables.items() if names}
        if concerned:
            overflows = scaler._found_inf_per_device(optimizer) if scaler.is_enabled() else {}
            skipped = any(bool(overflow) for overflow in overflows.values())
            for present, names in concerned.items():
                present.step_ended(scaler, names, skipped)
        return result

    return step


def _update(own: Any) -> Any:
    @wraps(own)
    def update(scaler: GradScaler, *args: Any, **kwargs: Any) -> None:
        following = [present for present in tuple(_PRESENT) if present.follows(scaler)]
        before = scaler.get_scale() if following else 1.0
        own(scaler, *args, **kwargs)
        after = scaler.get_scale() if following else 1.0
        if after != before:
            for present in following:
                present.scale_changed(after / before if before else 0.0)

    return update


_REPLACEMENTS: dict[str, Callable[[Any], Any]] = {"scale": _scale, "step": _step, "update": _update}
