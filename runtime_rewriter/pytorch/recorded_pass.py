"""One real pass of a module, recorded for playback: its output and its local gradients."""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autotune.errors import InvalidInput
from runtime_rewriter.pytorch.gradient_hooks import requiring_gradients

_VALUES = (bool, int, str, bytes, type(None), torch.dtype, torch.device)
"""Types whose value may decide what the module computes. Floats (a temperature) do not: they change
without changing shapes."""
_DEEPEST = 12


def signature_of(value: object, depth: int = 0) -> Hashable:
    """Structure, shapes, dtypes and small values of an input: equal signatures mean equal work."""
    if isinstance(value, Tensor):
        return ("tensor", tuple(value.shape), value.dtype, value.layout)
    if isinstance(value, _VALUES):
        return (type(value).__name__, value)
    kind = type(value).__qualname__
    if depth == _DEEPEST:
        return kind
    if isinstance(value, Mapping):
        items = ((str(key), signature_of(item, depth + 1)) for key, item in value.items())
        return (kind, tuple(items))
    if isinstance(value, (list, tuple, set, frozenset)):
        return (kind, tuple(signature_of(item, depth + 1) for item in value))
    if is_dataclass(value) and not isinstance(value, type):
        members = (getattr(value, field.name) for field in fields(value))
        return (kind, tuple(signature_of(member, depth + 1) for member in members))
    attributes = getattr(value, "__dict__", None)
    plain = not isinstance(value, (type, nn.Module)) and not callable(value)
    if isinstance(attributes, dict) and plain:
        return (kind, signature_of(attributes, depth + 1))  # the script's own batch object
    return kind


def tensors_needing_gradient(value: object, depth: int = 0) -> bool:
    """Whether a gradient would flow through the module into an input."""
    if isinstance(value, Tensor):
        return value.requires_grad
    if depth == _DEEPEST:
        return False
    items: Iterable[object] = value if isinstance(value, (list, tuple)) else ()
    if isinstance(value, Mapping):
        items = value.values()
    return any(tensors_needing_gradient(item, depth + 1) for item in items)


class _Replacing(TorchFunctionMode):
    """Make `copy.deepcopy` replace every tensor by `replace(tensor)`, also deep in script
    objects."""

    def __init__(self, replace: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._replace = replace

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if function is Tensor.__deepcopy__:
            return self._replace(args[0])
        return function(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Output:
    """A module's output: its structure, and its tensors in the order in which a copy meets them.

    `needs_gradient[i]`: tensor i takes part in the backward pass. The tensors hold no graph.
    """

    structure: object
    tensors: tuple[Tensor, ...]
    needs_gradient: tuple[bool, ...]

    @staticmethod
    def of(output: object) -> Output:
        """Copy every value. Raises `InvalidInput` if the output cannot be copied."""
        tensors: list[Tensor] = []
        flags: list[bool] = []

        def keep(tensor: Tensor) -> Tensor:
            tensors.append(tensor.detach().clone())
            flags.append(tensor.requires_grad)
            return tensors[-1]

        try:
            with _Replacing(keep):
                structure = copy.deepcopy(output)
        except (TypeError, RuntimeError, AttributeError) as error:
            raise InvalidInput(
                "accelerators can be emulated only for modules whose output can be copied, but "
                f"that of type {type(output).__name__} cannot: {error}; return tensors in lists, "
                "tuples, dicts or dataclasses"
            ) from error
        return Output(structure, tuple(tensors), tuple(flags))

    def rebuilt(self, tensors: Sequence[Tensor]) -> object:
        """The output with `tensors` instead of the recorded ones."""
        remaining = iter(tensors)
        with _Replacing(lambda _: next(remaining)):
            return copy.deepcopy(self.structure)


@dataclass(frozen=True)
class RecordedPass:
    """One pass: the module's output, and the local gradient of every parameter, if it has one."""

    output: Output
    gradients: tuple[Tensor | None, ...]


class GradientRecorder:
    """Keeps the next backward pass's gradients of `parameters`, before accumulation and averaging.

    The script's own hooks on its parameters have been applied to them.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], names: Sequence[str]) -> None:
        self._names = names
        self._gradients: list[Tensor | None] = [None] * len(parameters)
        self._problem: str | None = None
        with requiring_gradients(parameters):
            self._handles = [
                parameter.register_hook(partial(self._take, i))
                for i, parameter in enumerate(parameters)
            ]

    @property
    def begun(self) -> bool:
        """Whether a backward pass has computed a gradient."""
        recorded = any(gradient is not None for gradient in self._gradients)
        return self._problem is not None or recorded

    def _take(self, position: int, gradient: Tensor) -> None:
        if torch.is_grad_enabled():
            self._problem = "the script differentiates its gradients (create_graph=True)"
        if self._gradients[position] is not None:
            self._problem = (
                "a backward pass must give each parameter its gradient once, but "
                f"{self._names[position]!r} got several; use checkpoint(use_reentrant=False), and "
                "one backward pass for each forward pass"
            )
        self._gradients[position] = gradient.detach().clone()

    def finish(self) -> tuple[Tensor | None, ...]:
        """End the recording and return its gradients. Raises `InvalidInput` if unplayable."""
        for handle in self._handles:
            handle.remove()
        if self._problem is not None:
            raise InvalidInput(f"accelerators cannot be emulated: {self._problem}")
        return tuple(self._gradients)


def collectives_started() -> int:
    """The collectives that this process has started, over all groups whose backend counts them."""
    started = 0
    for group in dist.distributed_c10d._world.pg_map:
        try:
            started += int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
        except RuntimeError:  # this backend does not count
            continue
    return started
