"""Parameters and gradients whose first read calls back.

A watched tensor is the same object with another class until it is read. torch passes every function
and method called with it to `__torch_function__` first: in forward passes, optimizers,
`clip_grad_norm_`, `state_dict` and the script's own lines. There the callback runs and the object
gets its class back. So every use of a value still under way waits for it, and an unwatched tensor
costs nothing. A gradient whose value is there may stay watched for its operations alone: every
other function gets it with its own class. Queries that do not depend on the values (shape, dtype,
whether there is a gradient) are not reads.

A few functions take tensors without asking their classes, the methods of process groups among them.
They look for watched tensors among their arguments from `notice_arguments` on. Other reads outside
torch's Python interface are not detected: extensions that take tensors directly (extensions.py),
TorchScript, function transforms, compiled graphs (unseen_calls.py).
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from threading import Lock, RLock
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import DisableTorchFunction
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.multiprocessing.reductions import reduce_tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import _disable_current_modes

from runtime_rewriter.pytorch.gradient_operations import WITHOUT_READING, GradientOperations

OnRead = Callable[[Tensor], None]

_Watch = tuple[OnRead | None, GradientOperations | None]
_WATCH = "_autotune_watch"
"""Attribute of a watched tensor: its `_Watch`, a new one every time that it is watched."""
_NOTICES = "_autotune_notices"
READING = RLock()
"""Held by a thread that waits for a value."""
_CHANGING = Lock()
"""Guards what makes a tensor watched; nothing waits while it is held."""
_GETTERS = (
    "shape",
    "dtype",
    "device",
    "layout",
    "requires_grad",
    "is_leaf",
    "grad_fn",
    "ndim",
    "is_sparse",
    "grad",
)
_METHODS = (
    "size",
    "dim",
    "numel",
    "stride",
    "is_contiguous",
    "is_floating_point",
    "element_size",
    "register_hook",
)
_DATA: Any = Tensor.data
_UNCOUNTED = frozenset(
    [getattr(Tensor, name) for name in ("numpy", "__array__", "__dlpack__", "data_ptr", "set_")]
    + [getattr(Tensor, name) for name in ("storage", "untyped_storage", "_typed_storage")]
    + [_DATA.__get__, _DATA.__set__]
)
"""Functions that let a script change values without torch counting it in their version."""
_GRAD: Any = Tensor.grad
_SET_GRAD = _GRAD.__set__
_REQUIRES_GRAD: Any = Tensor.requires_grad
_NO_READS = frozenset(
    [getattr(Tensor, name).__get__ for name in _GETTERS]
    + [getattr(Tensor, name) for name in _METHODS]
    + [_GRAD.__delete__, _REQUIRES_GRAD.__set__]
)


class _Watched(Tensor):
    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in WITHOUT_READING and not kwargs:
            result = WITHOUT_READING[func](_operations_of, *args)
            if result is not NotImplemented:
                return result
        if func not in _NO_READS and not (func == _SET_GRAD and args[1] is None):
            tensors = list(_watched_in((args, tuple(kwargs.values()))))
            for tensor in tensors:
                _read(tensor)
            if any(map(_is_there, tensors)):
                with _plain_class(tensors, counted=func not in _UNCOUNTED):
                    return func(*args, **kwargs)
        # The same as a call under DisableTorchFunctionSubclass at half the cost, which matters:
        # optimizers ask every variable for its gradient.
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs)  # type: ignore[arg-type]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # torch's own reads the class before the values.
        _read(self)
        with _plain_class([self]):
            return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _read(self)
        with _plain_class([self]):
            return self.__reduce_ex__(protocol)


class _WatchedParameter(_Watched, Parameter):
    pass


_WATCHED_AS: dict[type, Any] = {Parameter: _WatchedParameter, Tensor: _Watched}
_PLAIN: dict[type, Any] = {watched: plain for plain, watched in _WATCHED_AS.items()}


def _shared(tensor: Tensor) -> Any:
    """What multiprocessing sends of a tensor."""
    _read(tensor)
    with _plain_class([tensor], counted=False):
        return reduce_tensor(tensor)


for _plain, _watched in _WATCHED_AS.items():
    for _name in ("__name__", "__qualname__", "__module__"):  # scripts print them
        setattr(_watched, _name, getattr(_plain, _name))
    ForkingPickler.register(_watched, _shared)


def can_watch(tensor: Tensor) -> bool:
    """Whether it is a plain tensor or parameter; other classes have their own
    `__torch_function__`."""
    return type(tensor) in _WATCHED_AS


def script_compiles() -> bool:
    """Whether this process has used torch.compile, whose graphs read tensors undetected."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters["frames"])


def watch(
    tensor: Tensor, on_read: OnRead | None, operations: GradientOperations | None = None
) -> None:
    """Call `on_read(tensor)` once, before the next operation on its values. `can_watch` must
    hold.

    `operations`: carry out norms and scaling without a read. None for `on_read`: the value is
    there, and the operations go on until `unwatch`.
    """
    with _CHANGING:
        setattr(tensor, _WATCH, (on_read, operations))
        kind = _WATCHED_AS.get(type(tensor))
        if kind is not None:  # not watched yet
            tensor.__class__ = kind


def unwatch(tensor: Tensor, only: _Watch | None = None) -> None:
    """Drop the callback, if the tensor is watched; with `only`, no other one."""
    with _CHANGING:
        plain = _PLAIN.get(type(tensor))
        if plain is not None and (only is None or only is getattr(tensor, _WATCH)):
            tensor.__class__ = plain
            delattr(tensor, _WATCH)


def stop_operations(tensor: Tensor) -> None:
    """Let norms and scaling of a watched tensor be reads from now on."""
    with _CHANGING:
        if is_watched(tensor):
            setattr(tensor, _WATCH, (getattr(tensor, _WATCH)[0], None))


def changing() -> bool:
    """Whether any thread is about to make a tensor watched, or no longer watched."""
    return _CHANGING.locked()


def is_watched(tensor: Tensor) -> bool:
    return type(tensor) in _PLAIN


def _read(tensor: Tensor) -> None:
    with READING:  # a read on another thread waits until the value is there
        watched: _Watch | None = getattr(tensor, _WATCH, None)
        if watched is None:
            return  # the value is there: another thread's read or flush came first
        if watched[0] is None:
            return
        watched[0](tensor)
        # Not after an exception, in a signal handler, say: the value is still to come. With `only`,
        # as another thread may watch it again by now.
        unwatch(tensor, only=watched)


def _is_there(tensor: Tensor) -> bool:
    """Whether the tensor is watched for its operations alone."""
    watched: _Watch | None = getattr(tensor, _WATCH, None)
    return watched is not None and watched[0] is None


@contextmanager
def _plain_class(tensors: Iterable[Tensor], counted: bool = True) -> Iterator[None]:
    """Give the tensors whose value is there their own class inside.

    Unless changes of their values are `counted`, they have no operations of ours afterwards.
    """
    answering = [(tensor, getattr(tensor, _WATCH)) for tensor in tensors if _is_there(tensor)]
    for tensor, watched in answering:
        unwatch(tensor, only=watched)
    try:
        yield
    finally:
        for tensor, (_, operations) in answering if counted else ():
            if not (is_watched(tensor) or operations is None or operations.ended):
                watch(tensor, None, operations)


def _operations_of(tensor: Tensor) -> GradientOperations | None:
    """The operations of a watched tensor; None if it must be read, or is not watched."""
    watched: _Watch | None = getattr(tensor, _WATCH, None)
    return None if watched is None else watched[1]


_OF_GROUPS = (
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce",
    "allgather",
    "allgather_coalesced",
    "_allgather_base",
    "allgather_into_tensor_coalesced",
    "all_gather_single",
    "gather",
    "scatter",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "send",
    "recv",
    "recv_anysource",
)
"""Methods of process groups that take tensors."""


def notice_arguments() -> None:
    """Let functions that ask no classes look for watched arguments, until the process ends."""
    if getattr(Parameter.__new__, _NOTICES, False):
        return
    os.register_at_fork(after_in_child=_renew_lock)
    places: list[tuple[Any, str]] = [(Parameter, "__new__"), (Tensor, "_make_subclass")]
    places += [(dist.ProcessGroup, name) for name in _OF_GROUPS]
    for kind, name in places:
        own = getattr(kind, name, None)  # older versions have fewer of them
        if own is not None:
            call = noticing(own)
            setattr(kind, name, call if kind is dist.ProcessGroup else staticmethod(call))


def _renew_lock() -> None:
    """Forget, in a forked process, that another thread may have held the lock."""
    global _CHANGING
    _CHANGING = Lock()


def noticing(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return `own` behind a read of all watched tensors among its arguments."""

    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = list(_watched_in((args, tuple(kwargs.values()))))
        for tensor in tensors:
            _read(tensor)
        with _plain_class(tensors, counted=False):
            return own(*args, **kwargs)

    setattr(call, _NOTICES, True)
    return call


@contextmanager
def outside_modes() -> Iterator[None]:
    """Run torch's functions without the modes, transforms and traces of the reading code."""
    bindings: Any = torch._C  # torch leaves this function out of its types
    trace = bindings._get_tracing_state()
    bindings._set_tracing_state(None)
    try:
        with (
            DisableTorchFunction(),
            _disable_current_modes(),
            temporarily_clear_interpreter_stack(),
            torch.no_grad(),
        ):
            yield
    finally:
        bindings._set_tracing_state(trace)


def _watched_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, _Watched):
        yield value
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _watched_in(inner)
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _watched_in(inner)
