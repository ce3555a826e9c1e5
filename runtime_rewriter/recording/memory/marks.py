"""Hooks on a module that cut a training step into segments at reads, gradients and regions.

A mark ends one segment and begins the next one. Every step with the same computation gives the same
marks, so times and bytes of different steps belong together.
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
from runtime_rewriter.pytorch.module_hooks import ModuleHook


class At(Enum):
    """The place of a mark in the step."""

    STEP = "step"  # a training step begins
    READ = "read"  # a module with variables is called
    ENTER = "enter"  # a region begins
    EXIT = "exit"
    OUTPUT = "output"  # the module has returned
    BACK = "back"  # the gradient of a region's output is known
    START = "start"  # the gradient of the module's output is known
    READY = "ready"  # the gradient of a variable is final
    END = "end"  # the backward pass has ended


@dataclass(frozen=True)
class Mark:
    """`names`: variables that are read, or the one whose gradient is ready.

    `region`: its number. `memories`: addresses of the region's output, or of the gradient.
    """

    at: At
    names: tuple[str, ...] = ()
    region: int | None = None
    memories: tuple[int, ...] = ()

    @property
    def kind(self) -> tuple[At, tuple[str, ...], int | None]:
        """The part that is equal in every step."""
        return self.at, self.names, self.region


@dataclass
class RegionFacts:
    """Whether a region draws random numbers, and its side effects (`changes`).

    `chain`: the `nn.Sequential` around it. `before`: states before the open calls.
    """

    name: str
    chain: str | None = None
    position: int = 0
    random: bool = False
    changes: str | None = None
    before: list[tuple[Any, ...]] = field(default_factory=list)


def memory_of(tensor: Tensor) -> int:
    """Address of the memory that the tensor and its aliases share."""
    return tensor.untyped_storage().data_ptr()


def memories_of(tensor: Tensor | None) -> list[Tensor]:
    """The dense tensors that hold its values: two of a sparse one."""
    if tensor is None:
        return []
    return [tensor._indices(), tensor._values()] if tensor.is_sparse else [tensor]


def default_regions(module: nn.Module) -> list[str]:
    """The outermost parts of sequences, and the parts of outermost lists that hold variables.

    Where there are none, the module's own parts.
    """
    regions: list[str] = []
    for name, part in module.named_modules():
        inside = any(name == outer or name.startswith(f"{outer}.") for outer in regions)
        if inside or not isinstance(part, nn.Sequential | nn.ModuleList):
            continue
        for child, inner in part.named_children():
            if isinstance(part, nn.Sequential) or _has_variables(inner):
                regions.append(f"{name}.{child}" if name else child)
    return regions or [name for name, part in module.named_children() if _has_variables(part)]


def _has_variables(part: nn.Module) -> bool:
    return any(True for _ in part.parameters())


def _facts(name: str, named: dict[str, nn.Module]) -> RegionFacts:
    outer, _, child = name.rpartition(".")
    parent = named[outer]
    if type(parent) is not nn.Sequential:
        return RegionFacts(name)
    return RegionFacts(name, outer, list(dict(parent.named_children())).index(child))


class StepMarks:
    """Calls `on_mark` at every mark in the steps of `module`, until `close` removes every hook.

    - `regions`: names of the submodules that could be computed twice.
    - `looks_at_rows`: also count the distinct rows of sparse gradients, which takes memory itself.
    - `batches`: leading dimensions of the inputs of all forward passes.
    """

    def __init__(
        self, module: nn.Module, regions: Sequence[str], on_mark: Callable[[Mark], None]
    ) -> None:
        self._on_mark = on_mark
        named = dict(module.named_modules())
        unknown = [name for name in regions if name not in named]
        if unknown:
            kind = type(module).__name__
            raise InvalidInput(
                f"regions must be submodules of {kind}, but it has no {unknown[0]!r}"
            )
        for name, part in named.items():
            if isinstance(part, torch.jit.ScriptModule):
                raise InvalidInput(
                    "the memory of a module is recorded by hooks on its parts, which TorchScript "
                    f"does not allow, but {name or 'the module'!r} is scripted; leave "
                    "torch.jit.script out to record it"
                )
        self.facts = [_facts(name, named) for name in regions]
        self._parameters = trainable_parameters(module)
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._backward_is_new = True
        self.looks_at_rows = True
        self.sparse_bytes: dict[str, int] = {}
        self.batches: set[int] = set()
        returned = ModuleHook(self._returned)
        self._handles: list[RemovableHandle] = [module.register_forward_hook(returned)]
        numbers = {id(named[name]): number for number, name in enumerate(regions)}
        for part in named.values():
            self._hook(part, numbers.get(id(part)))
        for name, parameter in self._parameters.items():
            self._handles.append(
                parameter.register_post_accumulate_grad_hook(partial(self._ready, name))
            )

    def _hook(self, part: nn.Module, region: int | None) -> None:
        if region is not None:
            enter = ModuleHook(partial(self._enter, region))
            exit_ = ModuleHook(partial(self._exit, region))
            self._handles += [
                part.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
                part.register_forward_hook(exit_, with_kwargs=True),
            ]
        names = [self._names.get(id(parameter)) for parameter in part.parameters(recurse=False)]
        variables = tuple(name for name in names if name is not None)
        if variables:
            read = ModuleHook(partial(self._read, variables))
            self._handles.append(part.register_forward_pre_hook(read))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _read(self, names: tuple[str, ...], *_: object) -> None:
        if torch.is_grad_enabled():
            self._on_mark(Mark(At.READ, names))

    @property
    def _computes(self) -> bool:
        """Whether a forward pass with gradients runs.

        One inside a backward pass (the script's own checkpoint) is no use of a region.
        """
        return torch.is_grad_enabled() and self._backward_is_new

    def _enter(self, region: int, part: nn.Module, inputs: object, kwargs: object) -> None:
        if self._computes:
            self._on_mark(Mark(At.ENTER, region=region))
            tensors = _tensors((inputs, kwargs))
            state = (_random_state(part), _versions(part.buffers()), _versions(tensors))
            self.facts[region].before.append(state)

    def _exit(
        self, region: int, part: nn.Module, inputs: object, kwargs: object, output: object
    ) -> None:
        if not self._computes:
            return
        facts, tensors = self.facts[region], _tensors(output)
        random, buffers, given = facts.before.pop()
        states = zip(random, _random_state(part), strict=True)
        facts.random |= not all(torch.equal(before, after) for before, after in states)
        if _versions(part.buffers()) != buffers:
            facts.changes = "it changes buffers, such as running statistics"
        elif _versions(_tensors((inputs, kwargs))) != given:
            facts.changes = "it changes its input in place"
        _on_first_gradient(tensors, lambda: self._on_mark(Mark(At.BACK, region=region)))
        memories = tuple(memory_of(tensor) for tensor in tensors)
        self._on_mark(Mark(At.EXIT, region=region, memories=memories))

    def _returned(self, module: nn.Module, inputs: object, output: object) -> None:
        if not torch.is_grad_enabled():
            return
        self.batches |= {tensor.shape[0] if tensor.dim() else 0 for tensor in _tensors(inputs)}
        _on_first_gradient(_tensors(output), self._start)
        self._on_mark(Mark(At.OUTPUT))

    def _start(self) -> None:
        self._on_mark(Mark(At.START))
        self._await_end()

    def _await_end(self) -> None:
        if self._backward_is_new:
            self._backward_is_new = False
            torch.autograd.Variable._execution_engine.queue_callback(self._ended)

    def _ended(self) -> None:
        self._backward_is_new = True
        self._on_mark(Mark(At.END))

    def _ready(self, name: str, parameter: Tensor) -> None:
        self._await_end()
        parts = memories_of(parameter.grad)
        if self.looks_at_rows and parameter.grad is not None and parameter.grad.is_sparse:
            rows = parameter.grad._indices().unique(dim=1).shape[1]
            stored_rows = max(1, parameter.grad._nnz())
            stored_bytes = sum(part.numel() * part.element_size() for part in parts)
            self.sparse_bytes[name] = rows * stored_bytes // stored_rows
        memories = tuple(memory_of(part) for part in parts)
        self._on_mark(Mark(At.READY, (name,), memories=memories))


def _on_first_gradient(tensors: Sequence[Tensor], act: Callable[[], None]) -> None:
    """Call `act` when the first gradient of the tensors is known."""
    called: list[bool] = []

    def hook(_: Tensor) -> None:
        if not called:
            called.append(True)
            act()

    for tensor in tensors:
        if tensor.requires_grad:
            tensor.register_hook(hook)


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
