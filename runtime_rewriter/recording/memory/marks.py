"""Where a training step is cut into segments: hooks on a module that mark reads, gradients and regions.

A mark ends one segment and begins the next one. Every step of a model that computes the same gives the same marks, so that times and
bytes of different steps belong together.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from autotune.errors import InvalidInput
from runtime_rewriter.pytorch.agreement import trainable_parameters


class At(Enum):
    """What happens at a mark."""

    STEP = "step"  # a training step begins
    READ = "read"  # a module is called that holds variables
    ENTER = "enter"  # a region begins
    EXIT = "exit"
    OUTPUT = "output"  # the module has returned
    BACK = "back"  # the gradient of what a region returned is known
    START = "start"  # the gradient of what the module returned is known
    READY = "ready"  # the gradient of a variable is final
    END = "end"  # the backward pass has ended


@dataclass(frozen=True)
class Mark:
    """`names`: variables that are read, or the one whose gradient is ready. `region`: its number. `memories`: addresses of what the
    region returned, or of the gradient."""

    at: At
    names: tuple[str, ...] = ()
    region: int | None = None
    memories: tuple[int, ...] = ()

    @property
    def kind(self) -> tuple[At, tuple[str, ...], int | None]:
        """What is alike in every step."""
        return self.at, self.names, self.region


@dataclass
class RegionFacts:
    """What was seen of a region: whether it draws random numbers, and what it changes besides making its output."""

    name: str
    chain: str | None = None  # the `nn.Sequential` that it is a part of
    position: int = 0
    random: bool = False
    changes: str | None = None
    before: list[tuple[Any, ...]] = field(default_factory=list)  # of the calls under way


def memory_of(tensor: Tensor) -> int:
    """Address of the memory that the tensor and its aliases share."""
    return tensor.untyped_storage().data_ptr()


def memories_of(tensor: Tensor | None) -> list[Tensor]:
    """The dense tensors that hold its values: two of a sparse one."""
    if tensor is None:
        return []
    return [tensor._indices(), tensor._values()] if tensor.is_sparse else [tensor]


def default_regions(module: nn.Module) -> list[str]:
    """The outermost parts of sequences, and of lists those that hold variables; where there are none, the module's own parts."""
    found: list[str] = []
    for name, part in module.named_modules():
        if isinstance(part, nn.Sequential | nn.ModuleList) and not any(
            _inside(name, outer) for outer in found
        ):
            chosen = isinstance(part, nn.Sequential)
            found.extend(
                f"{name}.{child}" if name else child
                for child, inner in part.named_children()
                if chosen or _has_variables(inner)
            )
    return found or [name for name, part in module.named_children() if _has_variables(part)]


def _has_variables(part: nn.Module) -> bool:
    return any(True for _ in part.parameters())


def _facts(name: str, named: dict[str, nn.Module]) -> RegionFacts:
    outer, _, child = name.rpartition(".")
    parent = named[outer]
    if type(parent) is not nn.Sequential:
        return RegionFacts(name)
    return RegionFacts(name, outer, list(dict(parent.named_children())).index(child))


def _inside(name: str, outer: str) -> bool:
    return name == outer or name.startswith(outer + ".")


class StepMarks:
    """Tells `on_mark` of everything that happens in the steps of `module` while it is open (`close` removes every hook).

    `regions`: names of the submodules that could be computed twice.
    """

    def __init__(
        self, module: nn.Module, regions: Sequence[str], on_mark: Callable[[Mark], None]
    ) -> None:
        self._on_mark = on_mark
        named = dict(module.named_modules())
        unknown = [name for name in regions if name not in named]
        if unknown:
            raise InvalidInput(
                f"regions must be submodules of {type(module).__name__}, but it has no {unknown[0]!r}"
            )
        self.facts = [_facts(name, named) for name in regions]
        self._parameters = trainable_parameters(module)
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._backward_is_new = True
        self.looks_at_rows = True
        """Also count the different rows of sparse gradients; this takes memory itself."""
        self.sparse_bytes: dict[str, int] = {}
        self.batches: set[int] = set()
        """Leading dimensions of the inputs of all forward passes."""
        self._handles: list[RemovableHandle] = [module.register_forward_hook(self._returned)]
        numbers = {id(named[name]): number for number, name in enumerate(regions)}
        for part in named.values():
            self._hook(part, numbers.get(id(part)))
        for name, parameter in self._parameters.items():
            self._handles.append(
                parameter.register_post_accumulate_grad_hook(partial(self._ready, name))
            )

    def _hook(self, part: nn.Module, region: int | None) -> None:
        if region is not None:
            self._handles.append(
                part.register_forward_pre_hook(
                    partial(self._enter, region), prepend=True, with_kwargs=True
                )
            )
            self._handles.append(
                part.register_forward_hook(partial(self._exit, region), with_kwargs=True)
            )
        own = [self._names[id(p)] for p in part.parameters(recurse=False) if id(p) in self._names]
        if own:
            self._handles.append(part.register_forward_pre_hook(partial(self._read, tuple(own))))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _read(self, names: tuple[str, ...], *_: object) -> None:
        if torch.is_grad_enabled():
            self._on_mark(Mark(At.READ, names))

    @property
    def _computes(self) -> bool:
        """A forward pass with gradients; one inside a backward pass (a checkpoint of the script's own) is no use of a region."""
        return torch.is_grad_enabled() and self._backward_is_new

    def _enter(self, region: int, part: nn.Module, inputs: object, kwargs: object) -> None:
        if self._computes:
            self._on_mark(Mark(At.ENTER, region=region))
            self.facts[region].before.append(
                (
                    _random_state(part),
                    _versions(part.buffers()),
                    _versions(_tensors((inputs, kwargs))),
                )
            )

    def _exit(
        self, region: int, part: nn.Module, inputs: object, kwargs: object, output: object
    ) -> None:
        if not self._computes:
            return
        facts, tensors = self.facts[region], _tensors(output)
        random, buffers, given = facts.before.pop()
        facts.random |= not all(
            torch.equal(a, b) for a, b in zip(random, _random_state(part), strict=True)
        )
        if _versions(part.buffers()) != buffers:
            facts.changes = "it changes buffers, such as running statistics"
        elif _versions(_tensors((inputs, kwargs))) != given:
            facts.changes = "it changes its input in place"
        told: list[bool] = []

        def back(_: Tensor) -> None:
            if not told:
                told.append(True)
                self._on_mark(Mark(At.BACK, region=region))

        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(back)
        self._on_mark(
            Mark(At.EXIT, region=region, memories=tuple(memory_of(tensor) for tensor in tensors))
        )

    def _returned(self, module: nn.Module, inputs: object, output: object) -> None:
        if not torch.is_grad_enabled():
            return
        self.batches |= {tensor.shape[0] if tensor.dim() else 0 for tensor in _tensors(inputs)}
        told: list[bool] = []

        def start(_: Tensor) -> None:
            if not told:
                told.append(True)
                self._on_mark(Mark(At.START))
                self._await_end()

        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(start)
        self._on_mark(Mark(At.OUTPUT))

    def _await_end(self) -> None:
        if self._backward_is_new:
            self._backward_is_new = False
            torch.autograd.Variable._execution_engine.queue_callback(self._ended)

    def _ended(self) -> None:
        self._backward_is_new = True
        self._on_mark(Mark(At.END))

    def _ready(self, name: str, parameter: Tensor) -> None:
        self._await_end()
        if self.looks_at_rows and parameter.grad is not None and parameter.grad.is_sparse:
            rows = parameter.grad._indices().unique(dim=1).shape[1]
            stored = max(1, parameter.grad._nnz())
            self.sparse_bytes[name] = (
                rows
                * sum(part.numel() * part.element_size() for part in memories_of(parameter.grad))
                // stored
            )
        self._on_mark(
            Mark(
                At.READY,
                (name,),
                memories=tuple(memory_of(part) for part in memories_of(parameter.grad)),
            )
        )


def _tensors(value: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and not leaf.is_sparse]


def _versions(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    return [(id(tensor), tensor._version) for tensor in tensors]


def _random_state(part: nn.Module) -> list[Tensor]:
    states = [torch.get_rng_state()]
    device = next((parameter.device for parameter in part.parameters()), None)
    if device is not None and device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states
