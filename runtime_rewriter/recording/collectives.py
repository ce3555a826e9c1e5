"""Logs every collective that this process issues, from our messages, torch's DDP or the script.

All of them pass torch's dispatcher as an op `c10d::...` of a process group. Inside
`CollectiveLog.watching` these ops have one more kernel, at the dispatch key BackendSelect, which
logs the call and redispatches it. The log holds what a trace lacks: group, sequence number, sizes
and message. The trace states when a collective began and ended. Gloo's own threads write it there;
to take their time from Python would make them wait for the interpreter.

The log sees whole collectives. The SENDs and RECVs of their chunks happen inside Gloo or NCCL.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work

from runtime_rewriter.pytorch.exchange.lanes import Step

BUCKET, BUFFERS, SCRIPT, MESSAGE, AUTOTUNE = "bucket", "buffers", "script", "message", "autotune"
"""Issuers of collectives.

DDP's reducer, DDP for the module's buffers, the script or its libraries, a message of a plan, and
our own agreement among the ranks."""

_CALLS_ON = "runtime_rewriter.pytorch.reads"
"""Watches what the script hands to a process group, and then calls torch."""
POINT_TO_POINT = ("send", "recv")
"""Beginnings of the names of the ops between two ranks."""
GLOO_THREADS = 2
"""Default number of threads of a Gloo process group (torch: ProcessGroupGloo::Options)."""


@dataclass(frozen=True)
class MessageStep:
    """A step of a message; `part` is its name, such as `push` and `pull` of a parameter server."""

    message: int
    lane: int
    part: str


@dataclass
class IssuedCollective:
    """One collective at its issue.

    - `sequence` counts the collectives of the group since the log began to watch, and is equal on
      all of its ranks. Sends and receives have a count of their own per `pair`.
    - `issued_ns` and `returned_ns` are on the monotonic clock.
    - `thread`: the kernel's number of the issuing thread. `site`: file and line in the script.
    - `root`: place in the group of the root, or of the other side of a send or receive.
    - `pair`: of a send or receive, the places of sender and receiver, and the tag: `0>2#7`.
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
    pair: str = ""

    @property
    def transaction(self) -> str:
        """An id that all participating ranks share, and no other collective has."""
        within = f"{self.pair}:{self.sequence}" if self.pair else str(self.sequence)
        return f"{self.group}:{within}"


@dataclass(frozen=True)
class LoggedGroup:
    """A process group; `ranks` are ranks of the world."""

    name: str
    description: str
    backend: str
    ranks: tuple[int, ...]


class _ThreadState(threading.local):
    """The message whose step this thread runs, and whether its operators are not recorded."""

    message: MessageStep | None = None
    paused: bool = False


@dataclass
class CollectiveLog:
    """The collectives of a process.

    The recorder sets `step`, the number of the step, and `traced`, whether a trace is being taken.
    `group_of_thread`: the group of a Gloo thread, learned from collectives before the recording.
    """

    step: int = -1
    traced: bool = False
    issued: list[IssuedCollective] = field(default_factory=list)
    groups: dict[str, LoggedGroup] = field(default_factory=dict)
    group_of_thread: dict[int, str] = field(default_factory=dict)
    paused: bool = False
    """Whether the steps that begin are ordinary ones, of which nothing is recorded."""
    _current: _ThreadState = field(default_factory=_ThreadState)
    _counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    _from_any: set[tuple[str, int]] = field(default_factory=set)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Log every collective of this process; always restore the dispatcher.

        Begin between two steps, with no message under way, so that all ranks count the same ones.
        """
        library = torch.library.Library("c10d", "IMPL")
        try:
            for name, op in _collective_ops():
                library.impl(name, self._kernel(op), "BackendSelect", with_keyset=True)
            yield
        finally:
            library._destroy()

    def around(self, number: int, lane: int, step: Step) -> dist.Work | None:
        """Run `step` as `Lanes.around` does; its collectives belong to this message."""
        function = step.args[0] if isinstance(step, partial) else step  # `exchange.sums`
        part = getattr(function, "__name__", type(function).__name__).strip("_")
        self._current.message = MessageStep(number, lane, part)
        try:
            if self._current.paused or not self.paused:  # lane 0 may be the pausing thread itself
                return step()
            with self._unrecorded():
                return step()
        finally:
            self._current.message = None

    def pause(self) -> None:
        """Log no collective that this thread or a lane issues until `resume`.

        The trace must not record this thread's operators meanwhile (`KinetoTrace.pause`).
        """
        self.paused = self._current.paused = True
        self.step = -1

    def resume(self) -> None:
        self.paused = self._current.paused = False

    @contextmanager
    def _unrecorded(self) -> Iterator[None]:
        """Neither log nor trace a lane's step: a span without an entry would go to another one."""
        torch.autograd._enable_record_function(False)
        self._current.paused = True
        try:
            yield
        finally:
            self._current.paused = False
            torch.autograd._enable_record_function(True)

    def _kernel(self, op: Any) -> Callable[..., Any]:
        """A replacement for `op`. Training waits for it, so the schema is read once, here."""
        name = op.name().removeprefix("c10d::").partition(".")[0]
        order = [argument.name for argument in op._schema.arguments]
        group_at = order.index("process_group")
        roots = [at for at, argument in enumerate(order) if argument in ("root_rank", "dst", "src")]
        tag_at = order.index("tag") if name.startswith(POINT_TO_POINT) else None
        backend_select = torch._C.DispatchKey.BackendSelect

        def kernel(keyset: Any, *arguments: Any, **options: Any) -> Any:
            issued_ns = time.perf_counter_ns()
            result = op.redispatch(keyset.remove(backend_select), *arguments, **options)
            group = ProcessGroup.unbox(arguments[group_at])
            root = int(arguments[roots[0]]) if roots else None
            pair = "" if tag_at is None else self._pair(name, group, root, int(arguments[tag_at]))
            counted = (group.group_name, pair)
            sequence = self._counts[counted]
            self._counts[counted] += 1  # while paused, too: ranks may pause between other messages
            if not self._current.paused:
                self._append(name, arguments, group, result, issued_ns, root, pair, sequence)
            return result

        return kernel

    def _pair(self, name: str, group: ProcessGroup, other: int | None, tag: int) -> str:
        """Sender, receiver and tag of a send or receive; between these messages keep their order.

        A receive from any rank has no known sender, and may take the messages of later ones.
        """
        own, within = group.rank(), (group.group_name, tag)
        if name == "send":
            return f"{own}>{other}#{tag}"
        if other is None:
            self._from_any.add(within)
        return f"{'any' if within in self._from_any else other}>{own}#{tag}"

    def _append(
        self,
        name: str,
        arguments: tuple[Any, ...],
        group: ProcessGroup,
        result: Any,
        issued_ns: int,
        root: int | None,
        pair: str,
        sequence: int,
    ) -> None:
        returned_ns = time.perf_counter_ns()
        logged = self._group(group, arguments)
        (in_elements, out_elements), dtype, element_bytes = _sizes(arguments)
        origin, site = _origin()
        message = self._current.message
        self.issued.append(
            IssuedCollective(
                op=name,
                group=logged.name,
                sequence=sequence,
                in_elements=in_elements,
                out_elements=out_elements,
                dtype=dtype,
                element_bytes=element_bytes,
                issued_ns=issued_ns,
                returned_ns=returned_ns,
                thread=threading.get_native_id(),
                step=self.step,
                origin=MESSAGE if message else origin,
                site=site,
                traced=self.traced,
                message=message,
                root=root,
                pair=pair,
            )
        )
        if logged.backend == "gloo" and not self.traced:
            work = result[-1] if isinstance(result, (tuple, list)) else result
            self._learn_threads(logged.name, work)

    def _group(self, group: ProcessGroup, arguments: tuple[Any, ...]) -> LoggedGroup:
        name = group.group_name
        if name not in self.groups:
            try:
                ranks = tuple(dist.get_process_group_ranks(group))
            except (KeyError, ValueError, RuntimeError):  # unknown to torch.distributed, or gone
                ranks = tuple(range(group.size()))
            backend = _backend(group, arguments)
            self.groups[name] = LoggedGroup(name, group.group_desc, backend, ranks)
        return self.groups[name]

    def _learn_threads(self, group: str, work: Any) -> None:
        """Learn that the thread that ends this collective serves this group.

        Not while a trace is taken: the thread waits for the interpreter.
        """
        known = list(self.group_of_thread.values()).count(group) >= GLOO_THREADS
        if known or not isinstance(work, torch.ScriptObject):
            return
        issuing = threading.get_native_id()

        def ended(_: object) -> None:
            thread = threading.get_native_id()
            if thread != issuing:  # work that is already complete calls back at once
                self.group_of_thread[thread] = group

        with suppress(RuntimeError):  # point-to-point works have no future
            Work.unbox(work).get_future().add_done_callback(ended)


def _collective_ops() -> Iterator[tuple[str, Any]]:
    """torch's ops on a process group that return a handle to wait for."""
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("c10d::"):
            continue
        base, _, overload = name.removeprefix("c10d::").partition(".")
        op = getattr(getattr(torch.ops.c10d, base), overload or "default")
        names = [argument.name for argument in op._schema.arguments]
        if "c10d.Work" in str(op._schema) and "process_group" in names:
            yield name, op


def _backend(group: ProcessGroup, arguments: tuple[Any, ...]) -> str:
    """The group's backend for the device of the tensors; a group may have one per device."""
    tensors = [tensor for argument in arguments for tensor in _tensors(argument)]
    try:
        return str(group._get_backend(tensors[0].device if tensors else torch.device("cpu")).name())
    except RuntimeError:  # none for this device
        return str(group.name())


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in _tensors(item)]


def _sizes(arguments: tuple[Any, ...]) -> tuple[tuple[int, int], str, int]:
    """((elements in, elements out), dtype, bytes per element).

    Outputs come first; inputs come second, where they are other tensors.
    """
    outputs = _tensors(arguments[0])
    has_inputs = len(arguments) > 1 and not isinstance(arguments[1], torch.ScriptObject)
    inputs = _tensors(arguments[1]) if has_inputs else []
    if not (outputs or inputs):
        return (0, 0), "", 0
    first = (outputs or inputs)[0]
    counts = sum(t.numel() for t in inputs or outputs), sum(t.numel() for t in outputs)
    return counts, str(first.dtype).removeprefix("torch."), first.element_size()


def _origin() -> tuple[str, str]:
    """(issuer, file:line in the script) from the Python frames above the kernel.

    A reducer has none of torch.distributed's frames.
    """
    frame = sys._getframe()
    for _ in range(3):  # this function, `_append` and the kernel
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
        if module.startswith("runtime_rewriter.") and module != _CALLS_ON:
            return AUTOTUNE, ""
        if not module.startswith("torch.") and module != _CALLS_ON:
            return SCRIPT, f"{above.f_code.co_filename}:{above.f_lineno}"
        above = above.f_back
    return SCRIPT, ""
