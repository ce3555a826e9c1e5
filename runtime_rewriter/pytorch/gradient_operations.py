"""Operations on gradients that need not wait for their values: 2-norms and scaling.

`clip_grad_norm_`, `get_total_norm`, `clip_grads_with_norm_` and `GradScaler.unscale_` consist of
these operations. A watched gradient (`reads`) carries them out through its `GradientOperations`.
Norms of other orders, other factors and all other functions are reads.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from runtime_rewriter.pytorch.clipping_norms import norms_of


class GradientOperations(Protocol):
    """The operations of one gradient, with the results of torch's own on its final values.

    `ended`: torch's own are called from now on.
    """

    ended: bool

    def norm(self) -> Tensor:
        """Return its 2-norm, 0-dimensional and of its dtype."""

    def scale(self, factor: Tensor) -> None:
        """Multiply by `factor`, which has one element."""

    def unscale(self, found_inf: Tensor, inverse_scale: Tensor) -> None:
        """Set `found_inf` to 1 if a value is not finite, and multiply by `inverse_scale`."""


OperationsOf = Callable[[Tensor], GradientOperations | None]
"""The operations of a tensor; None if there are none."""


def _norm(operations_of: OperationsOf, *args: Any) -> Any:
    if not 1 <= len(args) <= 2 or args[1:] not in ((), (2,)):
        return NotImplemented
    operations = operations_of(args[0])
    return NotImplemented if operations is None else operations.norm()


def _norms(operations_of: OperationsOf, *args: Any) -> Any:
    if not 1 <= len(args) <= 2 or args[1:] not in ((), (2,)):
        return NotImplemented
    norms = []
    for gradient in args[0]:
        operations = operations_of(gradient)
        norms += norms_of([gradient]) if operations is None else [operations.norm()]
    return norms


def _scale(operations_of: OperationsOf, *args: Any) -> Any:
    gradient, factor = args
    operations = operations_of(gradient)
    if operations is None or not _is_factor(factor):
        return NotImplemented
    operations.scale(factor)
    return gradient


def _scale_all(operations_of: OperationsOf, *args: Any) -> Any:
    gradients, factor = args
    if not _is_factor(factor):
        return NotImplemented
    rest = _apply(operations_of, gradients, lambda operations: operations.scale(factor))
    if len(rest) == len(gradients):
        return NotImplemented
    if rest:
        torch._foreach_mul_(rest, factor)
    return gradients


def _unscale_all(operations_of: OperationsOf, *args: Any) -> Any:
    gradients, found_inf, inverse_scale = args
    rest = _apply(
        operations_of, gradients, lambda operations: operations.unscale(found_inf, inverse_scale)
    )
    if len(rest) == len(gradients):
        return NotImplemented
    if rest:
        torch._amp_foreach_non_finite_check_and_unscale_(rest, found_inf, inverse_scale)
    return None


def _apply(
    operations_of: OperationsOf,
    gradients: Sequence[Tensor],
    apply: Callable[[GradientOperations], None],
) -> list[Tensor]:
    """Apply to all gradients that have operations; return the others."""
    rest = []
    for gradient in gradients:
        operations = operations_of(gradient)
        if operations is None:
            rest.append(gradient)
        else:
            apply(operations)
    return rest


def _is_factor(value: Any) -> bool:
    """Whether it is one number in a plain tensor, which scales without changing shape or dtype."""
    return type(value) is Tensor and value.dim() == 0 and value.is_floating_point()


WITHOUT_READING: dict[Any, Callable[..., Any]] = {
    torch.linalg.vector_norm: _norm,
    torch._foreach_norm: _norms,
    Tensor.mul_: _scale,
    torch._foreach_mul_: _scale_all,
    torch._amp_foreach_non_finite_check_and_unscale_: _unscale_all,
}
"""torch function -> its counterpart, called with (operations_of, *args). `NotImplemented`: read."""


class PlainOperations:
    """The operations on values that are there."""

    ended = False

    def __init__(self, gradient: Tensor) -> None:
        self._gradient = gradient

    @property
    def version(self) -> int:
        """How often the values have been changed, as far as torch counts it."""
        with DisableTorchFunctionSubclass():
            return self._gradient._version

    def norm(self) -> Tensor:
        with DisableTorchFunctionSubclass():
            return norms_of([self._gradient])[0]

    def scale(self, factor: Tensor) -> None:
        with DisableTorchFunctionSubclass():
            self._gradient.mul_(factor)

    def unscale(self, found_inf: Tensor, inverse_scale: Tensor) -> None:
        with DisableTorchFunctionSubclass():
            torch._amp_foreach_non_finite_check_and_unscale_(
                [self._gradient], found_inf, inverse_scale
            )
