"""One real pass of a module, recorded so that it can be played again: its output by input
signature, its local gradients."""

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

_VALUES = (bool, int, str, bytes, type(None), torch.dtype, torch.device)
"""Arguments whose value may decide what the module does. Floats (a temperature, say) change without
changing shapes."""
_DEEPEST = 12


def signature_of(value: object, depth: int = 0) -> Hashable:
    """What two inputs share that make the module do the same work: structure, shapes, dtypes and
    small values."""
    if isinstance(value, Tensor):
        return ("tensor", tuple(value.shape), value.dtype, value.layout)
    if isinstance(value, _VALUES):
        return (type(value).__name__, value)
    kind = type(value).__qualname__
    if depth == _DEEPEST:
        return kind
    if isinstance(value, Mapping):
        return (
            kind,
            tuple((str(key), signature_of(item, depth + 1)) for key, item in value.items()),
        )
    if isinstance(value, (list, tuple, set, frozenset)):
        return (kind, tuple(signature_of(item, depth + 1) for item in value))
    if is_dataclass(value) and not isinstance(value, type):
        return (
            kind,
            tuple(signature_of(getattr(value, field.name), depth + 1) for field in fields(value)),
        )
    own = getattr(value, "__dict__", None)
    if isinstance(own, dict) and not isinstance(value, (type, nn.Module)) and not callable(value):
        return (kind, signature_of(own, depth + 1))  # a batch object of the script's own
    return kind


def tensors_needing_gradient(value: object, depth: int = 0) -> bool:
    """Whether a gradient would flow through the module into one of its inputs."""
    if isinstance(value, Tensor):
        return value.requires_grad
    if depth == _DEEPEST:
        return False
    items: Iterable[object] = (
        value.values()
        if isinstance(value, Mapping)
        else value
        if isinstance(value, (list, tuple))
        else ()
    )
    return any(tensors_needing_gradient(item, depth + 1) for item in items)


class _Replacing(TorchFunctionMode):
    """Inside, `copy.deepcopy` puts `replace(tensor)` in the place of every tensor, however deep in
    the script's own objects it is."""

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
        """Copies every value. Raises `InvalidInput` where the output cannot be copied."""
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
                f"accelerators can be emulated only for modules whose output can be copied, but that of type {type(output).__name__} "
                f"cannot: {error}; return tensors in lists, tuples, dicts or dataclasses"
            ) from error
        return Output(structure, tuple(tensors), tuple(flags))

    def rebuilt(self, tensors: Sequence[Tensor]) -> object:
        """The output with other tensors in the places of the recorded ones."""
        remaining = iter(tensors)
        with _Replacing(lambda _: next(remaining)):
            return copy.deepcopy(self.structure)


@dataclass(frozen=True)
class RecordedPass:
    """One pass: what the module returned, and the local gradient of every parameter (None: it got
    none)."""

    output: Output
    gradients: tuple[Tensor | None, ...]


class GradientRecorder:
    """Keeps the gradients that the next backward pass gives to `parameters`, before they are
    accumulated or averaged.

    They are those after the script's own hooks on its parameters.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], names: Sequence[str]) -> None:
        self._names = names
        self._gradients: list[Tensor | None] = [None] * len(parameters)
        self._problem: str | None = None
        self._handles = [
            parameter.register_hook(partial(self._take, i))
            for i, parameter in enumerate(parameters)
        ]

    @property
    def begun(self) -> bool:
        """A backward pass has given gradients."""
        return self._problem is not None or any(
            gradient is not None for gradient in self._gradients
        )

    def _take(self, position: int, gradient: Tensor) -> None:
        if torch.is_grad_enabled():
            self._problem = "the script differentiates its gradients (create_graph=True)"
        if self._gradients[position] is not None:
            self._problem = (
                f"a backward pass must give each parameter its gradient once, but {self._names[position]!r} got several; "
                "use checkpoint(use_reentrant=False), and one backward pass for each forward pass"
            )
        self._gradients[position] = gradient.detach().clone()

    def finish(self) -> tuple[Tensor | None, ...]:
        """The gradients so far; recording ends. Raises `InvalidInput` where they cannot be
        played."""
        for handle in self._handles:
            handle.remove()
        if self._problem is not None:
            raise InvalidInput(f"accelerators cannot be emulated: {self._problem}")
        return tuple(self._gradients)


def collectives_made() -> int:
    """Collectives that this process has started so far, over all of its groups whose backend counts
    them."""
    made = 0
    for group in dist.distributed_c10d._world.pg_map:
        try:
            made += int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]  # missing in torch's stubs
        except RuntimeError:  # this backend does not count
            continue
    return made
