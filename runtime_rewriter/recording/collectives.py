"""Every collective that this process issues, whoever issues it: our messages, the reducer of torch's DDP, the script.

All of them pass torch's dispatcher as an op `c10d::...` of a process group. Inside `CollectiveLog.watching` these ops have one more
kernel, at the dispatch key BackendSelect, which writes down what is issued and calls on. The log holds what a trace cannot tell: group,
sequence number, sizes, and whose message it is. When a collective began and ended is the trace's to tell: Gloo's own threads
write it there, and taking their time from Python would make them wait for the interpreter.

What is seen is the whole collective. The SENDs and RECVs of its chunks happen inside Gloo or NCCL, which tell nobody.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work

from runtime_rewriter.pytorch.exchange.lanes import Step

BUCKET, BUFFERS, SCRIPT, MESSAGE, AUTOTUNE = "bucket", "buffers", "script", "message", "autotune"
"""Who issued a collective: DDP's reducer, DDP for the module's buffers, the script (or a library of its), a message of a plan, or we
ourselves for what the ranks agree on."""

GLOO_THREADS = 2
"""Threads of one Gloo process group, unless its options say otherwise (torch: ProcessGroupGloo::Options)."""


@dataclass(frozen=True)
class MessageStep:
    """A step of a message of the plan: `part` is the step's own name, as `push` and `pull` of a parameter server's."""

    message: int
    lane: int
    part: str


@dataclass
class Issued:
    """One collective as it was issued. `sequence` counts the collectives of its group, alike on all of its ranks.

    Sizes are elements; `issued_ns` and `returned_ns` are on the monotonic clock; `thread` is the kernel's number of the issuing thread.
    """

    op: str
    group: str
    sequence: int
    in_elements: int
    out_elements: int
    dtype: str
    element_bytes: int
    issued_ns: int
    returned_ns: int
    thread: int
    step: int
    origin: str
    site: str
    traced: bool
    message: MessageStep | None = None
    root: int | None = None
    """Its place in the group, of collectives with a root; the other side of a send or receive."""

    @property
    def transaction(self) -> str:
        """The same on every rank that takes part, and no other's."""
        return f"{self.group}:{self.sequence}"


@dataclass(frozen=True)
class Group:
    """A process group; `ranks` are those of the world."""

    name: str
    description: str
    backend: str
    ranks: tuple[int, ...]


@dataclass
class CollectiveLog:
    """`step` and `traced` are set by who records: the number of the step, and whether a trace is being taken."""

    step: int = -1
    traced: bool = False
    issued: list[Issued] = field(default_factory=list)
    groups: dict[str, Group] = field(default_factory=dict)
    group_of_thread: dict[int, str] = field(default_factory=dict)
    """Which group a thread of Gloo serves, learned from those that ended a collective before the recording."""
    _current: threading.local = field(default_factory=threading.local)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, every collective of this process is written down; the dispatcher is always restored."""
        library = torch.library.Library("c10d", "IMPL")
        try:
            for name, op in _collective_ops():
                library.impl(name, self._kernel(op), "BackendSelect", with_keyset=True)
            yield
        finally:
            library._destroy()

    def around(self, number: int, lane: int, step: Step) -> dist.Work | None:
        """As `Lanes.around`: what is issued inside `step` belongs to this message."""
        part = getattr(step, "__name__", type(step).__name__).strip("_")
        self._current.message = MessageStep(number, lane, part)
        try:
            return step()
        finally:
            self._current.message = None

    def _kernel(self, op: Any) -> Callable[..., Any]:
        """What stands in for `op`. The training waits for it, so what the schema tells is looked up here, once."""
        name = op.name().removeprefix("c10d::").partition(".")[0]
        order = [argument.name for argument in op._schema.arguments]
        group_at = order.index("process_group")
        root_at = next(
            (at for at, argument in enumerate(order) if argument in ("root_rank", "dst", "src")),
            None,
        )
        backend_select = torch._C.DispatchKey.BackendSelect

        def kernel(keyset: Any, *arguments: Any, **options: Any) -> Any:
            started_ns = time.perf_counter_ns()
            result = op.redispatch(keyset.remove(backend_select), *arguments, **options)
            root = None if root_at is None else int(arguments[root_at])
            self._write(name, arguments, arguments[group_at], result, started_ns, root)
            return result

        return kernel

    def _write(
        self,
        name: str,
        arguments: tuple[Any, ...],
        boxed: Any,
        result: Any,
        started_ns: int,
        root: int | None,
    ) -> None:
        returned_ns = time.perf_counter_ns()
        group = ProcessGroup.unbox(boxed)
        known = self._group(group, arguments)
        sizes, dtype, element_bytes = _sizes(arguments)
        origin, site = _origin()
        message = getattr(self._current, "message", None)
        self.issued.append(
            Issued(
                *(
                    name,
                    known.name,
                    _sequence(group),
                    *sizes,
                    dtype,
                    element_bytes,
                    started_ns,
                    returned_ns,
                ),
                *(
                    threading.get_native_id(),
                    self.step,
                    MESSAGE if message else origin,
                    site,
                    self.traced,
                    message,
                    root,
                ),
            )
        )
        if known.backend == "gloo" and not self.traced:
            self._learn_threads(
                known.name, result[-1] if isinstance(result, (tuple, list)) else result
            )

    def _group(self, group: ProcessGroup, arguments: tuple[Any, ...]) -> Group:
        name = group.group_name
        if name not in self.groups:
            try:
                ranks = tuple(dist.get_process_group_ranks(group))
            except (
                KeyError,
                ValueError,
                RuntimeError,
            ):  # made without torch.distributed's knowledge, or gone
                ranks = tuple(range(group.size()))
            self.groups[name] = Group(name, group.group_desc, _backend(group, arguments), ranks)
        return self.groups[name]

    def _learn_threads(self, group: str, work: Any) -> None:
        """Whichever thread ends this collective serves this group. Not while a trace is taken: the thread waits for the interpreter."""
        if list(self.group_of_thread.values()).count(group) >= GLOO_THREADS or not isinstance(
            work, torch.ScriptObject
        ):
            return
        issuing = threading.get_native_id()

        def ended(_: object) -> None:
            thread = threading.get_native_id()
            if thread != issuing:  # an already completed work calls back at once
                self.group_of_thread[thread] = group

        try:
            Work.unbox(work).get_future().add_done_callback(ended)
        except RuntimeError:  # point-to-point works have no future
            return


def _collective_ops() -> Iterator[tuple[str, Any]]:
    """Those ops of torch on a process group that give a handle to wait for."""
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("c10d::"):
            base, _, overload = name.removeprefix("c10d::").partition(".")
            op = getattr(getattr(torch.ops.c10d, base), overload or "default")
            if "c10d.Work" in str(op._schema) and any(
                argument.name == "process_group" for argument in op._schema.arguments
            ):
                yield name, op


def _backend(group: ProcessGroup, arguments: tuple[Any, ...]) -> str:
    """A group may have a backend for each device: that of what is sent."""
    tensors = [tensor for argument in arguments for tensor in _tensors(argument)]
    try:
        return str(group._get_backend(tensors[0].device if tensors else torch.device("cpu")).name())
    except RuntimeError:  # none for this device
        return str(group.name())


def _sequence(group: ProcessGroup) -> int:
    try:
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]  # missing in torch's stubs
    except RuntimeError:  # this backend does not count
        return -1


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return (
        [tensor for item in value for tensor in _tensors(item)]
        if isinstance(value, (list, tuple))
        else []
    )


def _sizes(arguments: tuple[Any, ...]) -> tuple[tuple[int, int], str, int]:
    """((elements in, elements out), dtype, bytes of an element): outputs come first, inputs second where they are others."""
    outputs = _tensors(arguments[0])
    inputs = (
        _tensors(arguments[1])
        if len(arguments) > 1 and not isinstance(arguments[1], torch.ScriptObject)
        else []
    )
    if not (outputs or inputs):
        return (0, 0), "", 0
    first = (outputs or inputs)[0]
    counts = sum(t.numel() for t in inputs or outputs), sum(t.numel() for t in outputs)
    return counts, str(first.dtype).removeprefix("torch."), first.element_size()


def _origin() -> tuple[str, str]:
    """(who issues it, file:line in the script), from the Python frames above the kernel; a reducer has none of torch.distributed's."""
    frame = sys._getframe()
    for _ in range(3):  # this function, `_write` and the kernel
        if frame.f_back is None:
            return BUCKET, ""  # a thread of the autograd engine
        frame = frame.f_back
    above: FrameType | None = frame
    while above is not None:
        module = above.f_globals.get("__name__", "")
        if module.startswith(("torch.nn.parallel.distributed", "runtime_rewriter.pytorch.ddp")):
            return BUFFERS, ""
        if module.startswith("torch.autograd"):
            return BUCKET, ""
        if module.startswith("runtime_rewriter."):
            return AUTOTUNE, ""
        if not module.startswith("torch."):
            return SCRIPT, f"{above.f_code.co_filename}:{above.f_lineno}"
        above = above.f_back
    return SCRIPT, ""
