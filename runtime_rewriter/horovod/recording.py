"""Logs when this rank enqueues tensors in Horovod, and when they are complete.

Horovod's timeline is written by rank 0 only. The log wraps the asynchronous primitives of
`horovod.torch`, on which its optimizers and blocking functions are built, wherever a module of
Horovod has imported them. A handle is looked at when the script asks for it, and the oldest one at
every other call: operations complete in the order of their execution, so one look per call tells
most completions while the script computes.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from types import ModuleType
from typing import Any

from autotune.recordings.horovod_calls import HorovodCall

_PACKAGE = "horovod.torch"
_OPERATIONS = "horovod.torch.mpi_ops"
PRIMITIVES = {
    "allreduce_async": "all_reduce",
    "allreduce_async_": "all_reduce",
    "grouped_allreduce_async": "all_reduce",
    "grouped_allreduce_async_": "all_reduce",
    "allgather_async": "all_gather",
    "grouped_allgather_async": "all_gather",
    "broadcast_async": "broadcast",
    "broadcast_async_": "broadcast",
    "alltoall_async": "all_to_all",
    "reducescatter_async": "reduce_scatter",
    "grouped_reducescatter_async": "reduce_scatter",
}
"""Horovod's function -> its collective."""


@dataclass
class HorovodLog:
    """The calls of this process, in order. The recorder sets `step`."""

    step: int = -1
    calls: list[HorovodCall] = field(default_factory=list)
    _place: dict[int, int] = field(default_factory=dict)  # handle -> place in `calls`
    _pending: deque[int] = field(default_factory=deque)  # handles, oldest first

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Log the calls inside; nothing if the script has not imported `horovod.torch`."""
        operations = sys.modules.get(_OPERATIONS)
        with ExitStack() as undo:
            if operations is not None:
                self._watch(operations, undo)
            yield

    def _watch(self, operations: Any, undo: ExitStack) -> None:
        poll, synchronize = operations.poll, operations.synchronize
        replacements: dict[str, Any] = {
            "poll": wraps(poll)(partial(self._poll, poll)),
            "synchronize": wraps(synchronize)(partial(self._synchronize, poll, synchronize)),
        }
        for name, collective in PRIMITIVES.items():
            if (primitive := getattr(operations, name, None)) is not None:
                name_at = list(inspect.signature(primitive).parameters).index("name")
                enqueue = partial(self._enqueue, poll, primitive, collective, name_at)
                replacements[name] = wraps(primitive)(enqueue)
        for module in _modules():
            for name, value in replacements.items():
                original = getattr(operations, name)
                if module is not operations and getattr(module, name, None) is original:
                    _replace(module, name, value, undo)
        for name, value in replacements.items():
            _replace(operations, name, value, undo)

    def _enqueue(
        self,
        poll: Callable[[int], bool],
        primitive: Callable[..., int],
        collective: str,
        name_at: int,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> int:
        given: Any = args[0] if args else kwargs.get("tensor", kwargs.get("tensors"))
        tensors: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
        self._look(poll)
        called_s = time.perf_counter()
        handle = primitive(*args, **kwargs)
        returned_s = time.perf_counter()
        self._place[handle] = len(self.calls)
        self._pending.append(handle)
        self.calls.append(
            HorovodCall(
                name=str((args[name_at] if len(args) > name_at else kwargs.get("name")) or ""),
                op=collective,
                tensors=len(tensors),
                size_bytes=sum(one.numel() * one.element_size() for one in tensors),
                dtype=str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
                step=self.step,
                called_s=called_s,
                returned_s=returned_s,
                incomplete_s=returned_s,
            )
        )
        return handle

    def _look(self, poll: Callable[[int], bool]) -> None:
        """Look at the oldest handles until one is not complete."""
        while self._pending:
            handle = self._pending[0]
            if handle in self._place:
                complete = poll(handle)
                self._note(handle, complete)
                if not complete:
                    return
            self._pending.popleft()

    def _poll(self, poll: Callable[[int], bool], /, handle: int) -> bool:
        complete = poll(handle)
        self._note(handle, complete)
        return complete

    def _synchronize(
        self, poll: Callable[[int], bool], synchronize: Callable[[int], Any], /, handle: int
    ) -> Any:
        if handle in self._place:
            self._note(handle, bool(poll(handle)))
            place = self._place[handle]
            self.calls[place] = replace(self.calls[place], awaited_s=time.perf_counter())
        try:
            return synchronize(handle)
        finally:
            self._note(handle, True)
            self._place.pop(handle, None)

    def _note(self, handle: int, complete: bool) -> None:
        """Keep the last look without and the first look with completion."""
        place = self._place.get(handle)
        if place is None or self.calls[place].complete_s is not None:
            return
        now_s = time.perf_counter()
        call = self.calls[place]
        if complete:
            self.calls[place] = replace(call, complete_s=now_s)
        else:
            self.calls[place] = replace(call, incomplete_s=now_s)


def _modules() -> list[ModuleType]:
    """The loaded modules of `horovod.torch`, which take its functions from each other."""
    loaded = list(sys.modules.items())
    return [one for name, one in loaded if name == _PACKAGE or name.startswith(f"{_PACKAGE}.")]


def _replace(module: ModuleType, name: str, value: object, undo: ExitStack) -> None:
    undo.callback(setattr, module, name, getattr(module, name))
    setattr(module, name, value)
