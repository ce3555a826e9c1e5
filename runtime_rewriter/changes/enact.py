"""Enacts what-ifs on a script from outside: each as its line of code would, or not at all.

Each change is a context manager that patches torch where the script builds its model or optimizer,
and restores it. `Enacted.check` raises `InvalidInput` once the script trains, if a change found
nothing to change.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from autotune.errors import InvalidInput
from runtime_rewriter.changes.autocast import autocast_forward
from runtime_rewriter.changes.forward import first_forward


@dataclass
class Enacted:
    """What the changes did so far: `done` by name of the change, and `notes` for people."""

    wanted: tuple[str, ...]
    done: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def did(self, change: str) -> None:
        self.done[change] = self.done.get(change, 0) + 1

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def check(self) -> None:
        """Call when the script trains. Raises `InvalidInput` for a change without effect."""
        for change in self.wanted:
            if not self.done.get(change):
                raise InvalidInput(
                    f"{change} must change something in this script, but "
                    f"{self.reasons.get(change, 'found nothing to change')}"
                )


@contextmanager
def enacted(changes: Sequence[str], amounts: Mapping[str, float]) -> Iterator[Enacted]:
    """Enact the changes on what is built inside. Raises `InvalidInput` for a missing amount."""
    state = Enacted(tuple(changes))
    with ExitStack() as restore:
        for change in changes:
            restore.enter_context(_ENACTORS[change](state, amounts))
        yield state


_Enactor = Callable[[Enacted, Mapping[str, float]], AbstractContextManager[None]]

# -- optimizers ----------------------------------------------------------------------------------


def _optimizers(change: str, option: str, value: bool) -> _Enactor:
    """Set `option` of every optimizer of torch that has it, such as `fused=True`."""

    @contextmanager
    def enact(state: Enacted, amounts: Mapping[str, float]) -> Iterator[None]:
        kinds = _with_option(option)
        state.reasons[change] = (
            f"it builds no optimizer of torch.optim with a choice of {option}; those are "
            + ", ".join(kind.__name__ for kind in kinds)
        )
        building = _Building()
        with ExitStack() as restore:
            for kind in kinds:
                build = _patched(kind, change, option, value, state, building)
                restore.enter_context(_replaced(kind, "__init__", build))
            yield

    return enact


@dataclass
class _Building:
    """`inside`: within a patched constructor: AdamW builds itself as an Adam."""

    inside: bool = False


def _patched(
    kind: type[torch.optim.Optimizer],
    change: str,
    option: str,
    value: bool,
    state: Enacted,
    building: _Building,
) -> Callable[..., None]:
    original = kind.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def build(self: torch.optim.Optimizer, *values: Any, **options: Any) -> None:
        if building.inside:
            original(self, *values, **options)
            return
        given = signature.bind(self, *values, **options)
        for stated in ("fused", "foreach"):
            if given.arguments.get(stated) is not None:
                raise InvalidInput(
                    f"{change} sets {option}={value}, but the script states {stated}="
                    f"{given.arguments[stated]!r} for {kind.__name__}; change it there"
                )
        given.arguments[option] = value
        building.inside = True
        try:
            original(*given.args, **given.kwargs)
        except RuntimeError as error:
            raise InvalidInput(f"{kind.__name__} cannot have {option}={value}: {error}") from error
        finally:
            building.inside = False
        state.did(change)

    return build


def _with_option(option: str) -> list[type[torch.optim.Optimizer]]:
    kinds = [vars(torch.optim)[name] for name in sorted(vars(torch.optim))]
    return [
        kind
        for kind in kinds
        if inspect.isclass(kind)
        and issubclass(kind, torch.optim.Optimizer)
        and option in inspect.signature(kind.__init__).parameters
    ]


# -- models --------------------------------------------------------------------------------------


def _amp(change: str) -> _Enactor:
    """`torch.autocast(..., dtype=torch.bfloat16)` from the model's forward pass to `backward()`."""

    @contextmanager
    def enact(state: Enacted, amounts: Mapping[str, float]) -> Iterator[None]:
        state.reasons[change] = "it called no module in training mode that has trainable parameters"
        with autocast_forward(lambda: state.did(change)):
            yield

    return enact


@contextmanager
def _channels_last(state: Enacted, amounts: Mapping[str, float]) -> Iterator[None]:
    """`model.to(memory_format=torch.channels_last)`, and its images likewise."""
    state.reasons["channels_last"] = "no parameter of its model has four dimensions"
    converted: set[int] = set()

    def convert(module: nn.Module) -> None:
        if id(module) in converted:
            return
        converted.add(id(module))
        if any(parameter.dim() == 4 for parameter in module.parameters()):
            any_module: Any = module  # torch declares no `memory_format` for `to`
            any_module.to(memory_format=torch.channels_last)
            module.register_forward_pre_hook(_images_last)
            state.did("channels_last")

    def before(values: dict[str, Any]) -> None:
        convert(values["module"])

    def on_first(module: nn.Module) -> None:
        if isinstance(module, DistributedDataParallel):
            return  # converted when it was wrapped
        convert(module)

    with _built_ddp(before=before), first_forward(on_first):
        yield


def _images_last(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        value.contiguous(memory_format=torch.channels_last)
        if isinstance(value, torch.Tensor) and value.dim() == 4
        else value
        for value in inputs
    )


@contextmanager
def _bucket_size(state: Enacted, amounts: Mapping[str, float]) -> Iterator[None]:
    """`DistributedDataParallel(..., bucket_cap_mb=AMOUNT)`."""
    if "bucket_size" not in amounts:
        raise InvalidInput("bucket_size needs an amount in MiB, such as bucket_size=50")
    state.reasons["bucket_size"] = "it builds no DistributedDataParallel"

    def before(values: dict[str, Any]) -> None:
        values["bucket_cap_mb"] = amounts["bucket_size"]
        state.did("bucket_size")

    with _built_ddp(before=before):
        yield


@contextmanager
def _fp16_gradients(state: Enacted, amounts: Mapping[str, float]) -> Iterator[None]:
    """`model.register_comm_hook(None, default_hooks.fp16_compress_hook)`."""
    state.reasons["fp16_gradients"] = "it builds no DistributedDataParallel"

    def after(model: DistributedDataParallel) -> None:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        state.did("fp16_gradients")

    with _built_ddp(after=after):
        yield


@contextmanager
def _built_ddp(
    before: Callable[[dict[str, Any]], None] = lambda values: None,
    after: Callable[[DistributedDataParallel], None] = lambda model: None,
) -> Iterator[None]:
    """Let `before` change the arguments of each wrapper, and `after` the wrapper."""
    original = DistributedDataParallel.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def build(self: DistributedDataParallel, *values: Any, **options: Any) -> None:
        given = signature.bind(self, *values, **options)
        before(given.arguments)
        original(*given.args, **given.kwargs)
        after(self)

    with _replaced(DistributedDataParallel, "__init__", build):
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


_ENACTORS: dict[str, _Enactor] = {
    "amp": _amp("amp"),
    "amp_cpu": _amp("amp_cpu"),
    "channels_last": _channels_last,
    "fused_adam": _optimizers("fused_adam", "fused", True),
    "fused_adam_cpu": _optimizers("fused_adam_cpu", "fused", True),
    "foreach_optimizer": _optimizers("foreach_optimizer", "foreach", True),
    "for_each_optimizer": _optimizers("for_each_optimizer", "foreach", False),
    "bucket_size": _bucket_size,
    "fp16_gradients": _fp16_gradients,
}
