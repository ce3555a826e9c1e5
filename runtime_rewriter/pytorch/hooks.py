"""Gradient synchronization by a plan, from hooks on the parameters.

A parameter's gradient is packed the moment it is final, a small one together with the other small ones of its message. A message
whose slices are all packed is issued in plan order from inside the backward pass, so that communication overlaps computation.  The
backward pass ends (a callback of the autograd engine) when every message has arrived and every `.grad` holds the average.  Without a
plan nothing is hooked and the module's own synchronization, if any, runs untouched.  Nor is anything hooked under a plan that is nothing
but buckets, where a `Carrier` lets a reducer of torch carry it out.

Gradients count as in torch's DDP: under accumulation only the last backward pass synchronizes; with
`find_unused_parameters` a parameter that no rank used keeps its `.grad`.
"""

# mypy: untyped-calls-exclude=torch, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from autotune.errors import AutotuneError, InvalidStrategy, SynchronizationError
from autotune.strategy_space.enactable import why_scaled_refused
from autotune.strategy_space.plan import Plan, TensorSlice
from autotune.strategy_space.strategy import SparseHandling
from runtime_rewriter.pytorch.agreement import agree, assumed_workload, check_fit, trainable_parameters
from runtime_rewriter.pytorch.autograd import by_identity, reachable_variables, tensors_with_graph
from runtime_rewriter.pytorch.cross_step import CrossStep
from runtime_rewriter.pytorch.exchange.device import Device
from runtime_rewriter.pytorch.exchange.hierarchical import Circles
from runtime_rewriter.pytorch.exchange.lanes import Lanes
from runtime_rewriter.pytorch.exchange.present_rows import PresentRows, sparse_parameters
from runtime_rewriter.pytorch.exchange.ranks import Ranks
from runtime_rewriter.pytorch.exchange.residuals import Residuals
from runtime_rewriter.pytorch.exchange.row_transfer import RowTransfer, waiting_rows, write_average
from runtime_rewriter.pytorch.exchange.transfer import Transfer, pack_slice, slice_of
from runtime_rewriter.pytorch.native_buckets import BucketReducer, Buckets, Carrier
from runtime_rewriter.pytorch.native_observation import ObservedPass
from runtime_rewriter.pytorch.observers import Accelerator, BackwardObserver, StepListener

_NO_GRAD_ALREADY = nullcontext()


class GradientSynchronizer:
    """Synchronizes the gradients of `module` over `process_group` by the loaded plan.

    Building one is collective over the group, as building a DDP is. `timeout_s` bounds every message,
    `agreement_timeout_s` how long ranks wait for each other in `load`. `static_graph` as in DDP: the set
    of used parameters never changes, and the first backward pass learns how often each is accumulated.
    `why_not` says why the module's surroundings forbid plans at all; `on_byte_scale` scales what they send themselves; `carrier` is where
    they can drive a reducer of torch.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        *,
        timeout_s: float = 60.0,
        agreement_timeout_s: float = 20.0,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        why_not: Callable[[], str | None] = lambda: None,
        on_byte_scale: Callable[[float], None] = lambda byte_scale: None,
        carrier: Carrier | None = None,
    ) -> None:
        self.module = module
        named = trainable_parameters(module)
        self.names: tuple[str, ...] = tuple(named)
        self.parameters: tuple[nn.Parameter, ...] = tuple(named.values())
        self.ranks = Ranks.of(process_group, timeout_s, agreement_timeout_s)
        self.device = Device(self.parameters[0].device)
        self.lanes = Lanes(self.ranks, self.device)
        self.residuals = Residuals(named, self.ranks.rank, self.ranks.size)
        self.listeners: list[StepListener] = []
        self.observers: list[BackwardObserver] = []
        self.accelerator: Accelerator | None = None  # None: the module itself computes
        self.byte_scale = 1.0
        self.deferred = False  # True: messages are issued when the backward pass has ended (profiling)
        self._find_unused, self._static = find_unused_parameters, static_graph
        self.why_not, self._on_byte_scale, self._carrier = why_not, on_byte_scale, carrier
        self._index_of = by_identity(self.parameters)
        self._index = {name: position for position, name in enumerate(self.names)}
        self._sparse = sorted(p for p, parameter in enumerate(self.parameters) if parameter in sparse_parameters(module))
        self._plan: Plan | None = None
        self.native: BucketReducer | None = None  # torch's reducer, where it carries the plan out
        self._observed = ObservedPass(self.names, self.parameters, self.observers, self._on_native_gradient)
        self._transfers: list[Transfer | RowTransfer] = []
        self._handles: list[RemovableHandle] = []
        self._lock = Lock()
        self._broken: str | None = None
        self._synchronizing = True
        self._learned: list[int] | None = None  # accumulations per backward pass of a static graph
        self._used = [False] * len(self.names)  # since the last synchronization, by any backward pass
        self._reachable: set[int] = set()
        self._versions: list[int | None] = []
        self._armed = self._begun = self._boundary_due = False
        self._saw_training = self._saw_eval = self._unclean = False
        self.cross_step = CrossStep(self.parameters, self._unpack)
        self._reset_backward()

    # -- plans ---------------------------------------------------------------------------------------

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The script's group over which gradients are averaged."""
        return self.ranks.base

    @property
    def model_id(self) -> str:
        """`Workload.id` of the module: the plans that fit it carry the same."""
        return assumed_workload(self.module).id

    @property
    def plan(self) -> Plan | None:
        """What is loaded; None: this object does nothing on backward."""
        return self._plan

    def load(self, plan: Plan | None, *, deferred: bool = False) -> None:
        """Collective, between two steps: from now on synchronize by `plan`, or not at all.

        `deferred`: messages are issued when the backward pass has ended, so that nothing disturbs it (profiling).
        All ranks succeed or all raise: `InvalidStrategy` (cannot be enacted), `ModelMismatch` (made for
        another model or world), `PlanMismatch` (ranks hold different plans), `SynchronizationError` (a
        rank is gone). After an error the earlier plan is still loaded.
        """
        self._check_usable()
        self.cross_step.settle_all()
        error: AutotuneError | None = None
        buckets = None
        try:
            if plan is not None:
                reason = self.why_not() or why_scaled_refused(plan, self.byte_scale)
                if reason is not None:
                    raise InvalidStrategy(f"plans cannot be enacted here: {reason}")
                reason = self.cross_step.why_not() if plan.cross_step else None
                if reason is not None:
                    raise InvalidStrategy(f"plan {plan.id} cannot be enacted: synchronization cannot cross the step, since {reason}")
                check_fit(plan, self.module, self.ranks.size)
                if self._carrier is not None and not deferred and not self.residuals.in_use:  # what waits is for our own messages
                    buckets = self._carrier.buckets_of(plan)
        except AutotuneError as problem:
            error = problem
        agree(self.ranks, plan, error, self.byte_scale)
        transfers = [] if plan is None or buckets is not None else self._transfers_by(plan)
        # Behind messages that cross the step a vote would wait for them.
        voting = self._find_unused or bool(self._sparse)
        self._votes = self.lanes.votes() if voting and plan is not None and plan.cross_step else self.ranks.first
        self._unhook()
        self.lanes.trim()
        self.native = None if buckets is None else self._carry(buckets)
        self._plan, self._transfers, self.deferred = plan, transfers, deferred
        self.residuals.plan_loaded(plan)
        self._slots: list[list[tuple[TensorSlice, Tensor]]] = [[] for _ in self.names]
        self._packed_alone: list[list[tuple[TensorSlice, Tensor]]] = [[] for _ in self.names]  # those that are packed when they are ready
        self._row_transfers: list[list[RowTransfer]] = [[] for _ in self.names]
        self._transfers_of: list[list[Transfer | RowTransfer]] = [[] for _ in self.names]  # one per slice
        for transfer in transfers:
            if isinstance(transfer, RowTransfer):
                position = self._index[transfer.part.variable]
                self._row_transfers[position].append(transfer)
                self._transfers_of[position].append(transfer)
                continue
            batched = frozenset(transfer.batched)
            for number, (part, view) in enumerate(transfer.views):
                position = self._index[part.variable]
                self._slots[position].append((part, view))
                self._transfers_of[position].append(transfer)
                if number not in batched:
                    self._packed_alone[position].append((part, view))
        dense = (position for position in self._sparse if not self._row_transfers[position])
        self._present_rows = PresentRows({position: self.parameters[position] for position in dense})
        self._reset_backward()
        self.cross_step.enable(self._transfers_of if plan is not None and plan.cross_step else None)
        if plan is not None and self.native is None:
            hooks = (partial(self._on_gradient, position) for position in range(len(self.parameters)))
            self._handles = [p.register_post_accumulate_grad_hook(hook) for p, hook in zip(self.parameters, hooks, strict=True)]

    def _transfers_by(self, plan: Plan) -> list[Transfer | RowTransfer]:
        """Collective: after agreement, since messages make process groups."""
        circles = Circles.of(plan, self.lanes)
        named = dict(zip(self.names, self.parameters, strict=True))
        made: list[Transfer | RowTransfer] = []
        for number, message in enumerate(plan.messages):
            kind = Transfer if message.sparse is SparseHandling.DENSE else RowTransfer
            made.append(kind(number, message, named, self.residuals, self.lanes, circles, self.byte_scale))
        return made

    def _carry(self, buckets: Buckets) -> BucketReducer:
        assert self._carrier is not None
        named = dict(zip(self.names, self.parameters, strict=True))
        try:
            return self._carrier.carry(buckets, named, self.ranks.first, self.byte_scale)
        except RuntimeError as error:
            self._broken = str(error)
            raise SynchronizationError(f"all ranks must make the same buckets, but rank {self.ranks.rank} failed: {error}") from error

    def forget_residuals(self) -> None:
        """Between two steps, on every rank: what compressed messages have not sent is dropped."""
        self.cross_step.settle_all()
        self.residuals.clear()

    def emulate(self, accelerator: Accelerator | None) -> None:
        """Local, between two steps: from now on `accelerator` stands for the module's own computation, or nothing does."""
        if self.accelerator is not None:
            self.listeners.remove(self.accelerator)
        if accelerator is not None:
            self.listeners.insert(0, accelerator)
        self.accelerator = accelerator

    def scale_bytes(self, byte_scale: float) -> None:
        """Local, between two steps: of what is sent from now on, 1/`byte_scale` travels; plans follow when they are loaded.

        The gradients are averages only where they travelled. Raises `InvalidInput` where it cannot be done.
        """
        self._on_byte_scale(byte_scale)
        self.byte_scale = byte_scale

    def close(self) -> None:
        """Remove every hook, stop the threads and give the process groups back. Local."""
        self.cross_step.settle_all()
        self.cross_step.close()
        self._unhook()
        self._plan, self._transfers = None, []
        self.listeners.clear()
        self.observers.clear()
        self.lanes.close()
        self.ranks.destroy()

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.lanes.stop()
        self._observed.close()
        self.native = None
        if self._carrier is not None:
            self._carrier.release()

    def _check_usable(self) -> None:
        if self._broken is not None:
            raise SynchronizationError(f"after a failed synchronization the ranks must be started again: {self._broken}")

    # -- forward -------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """On a plain module (a DDP has its own): forward and backward passes inside accumulate gradients without synchronizing them."""
        before, self._synchronizing = self._synchronizing, False
        try:
            yield
        finally:
            self._synchronizing = before

    @torch.compiler.disable
    def before_forward(self, synchronize: bool) -> None:
        """First thing in every forward pass with gradients. `synchronize`: its backward pass is to be synchronized."""
        self._check_usable()
        if any(self._fired) or (self.native is not None and self._begun):
            raise SynchronizationError("a backward pass must end before the next forward pass begins, but the last one was interrupted")
        if self._boundary_due:
            self._boundary_due = False
            if self.accelerator is not None:
                self.accelerator.before_boundary()
            clean = not (self._unclean or (self._saw_eval and self._saw_training))
            self._saw_training = self._saw_eval = self._unclean = False
            if self.listeners:
                now_s = self.device.now_s()
                for listener in tuple(self.listeners):
                    listener.on_boundary(now_s, clean)
        self._saw_training |= self.module.training
        self._saw_eval |= not self.module.training
        self.cross_step.forward_begins(seen=self.accelerator is None)
        self._armed = synchronize

    @property
    def synchronizing(self) -> bool:
        """The backward pass of the last forward pass is to be synchronized."""
        return self._armed

    @torch.compiler.disable(recursive=False)
    def compute(self, call: Callable[..., Any], inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's own part of a forward pass: `call(*inputs, **kwargs)`, or what stands for it."""
        accelerator = self.accelerator
        if accelerator is None or not torch.is_grad_enabled():
            return call(*inputs, **kwargs)
        return accelerator.run(call, inputs, kwargs)

    @torch.compiler.disable
    def forward_starts(self) -> None:
        """Before the module computes in a forward pass with gradients, when its buffers have been sent."""
        for observer in tuple(self.observers):
            observer.on_forward_start()

    @torch.compiler.disable
    def after_forward(self, output: object) -> None:
        """Last thing in every forward pass with gradients: finds where its backward pass will start."""
        self.cross_step.forward_ended()
        if not self._armed or (self._plan is None and not self._ends_matter):
            return
        tensors = tensors_with_graph(output)
        for tensor in tensors:
            tensor.register_hook(self._on_output_gradient)
        if self.native is not None:
            self._observed.prepare()
        if self._plan is None or (self.native is not None and not self.observers):
            return
        if self._find_unused and not self._static:
            self._reachable |= reachable_variables(tensors, self._index_of)
        for observer in tuple(self.observers):
            observer.on_forward_output(tensors)

    @torch.compiler.disable
    def before_evaluation(self) -> None:
        """First thing in a forward pass without gradients, for which nothing needs to be put off."""
        self.mark_unclean()
        self.cross_step.settle_all()

    def mark_unclean(self) -> None:
        """This step holds something that is no training step: a forward pass without gradients, say."""
        self._unclean = True

    # -- backward ------------------------------------------------------------------------------------

    def _reset_backward(self) -> None:
        count = len(self.names)
        self._fired = [0] * count
        self._filled = [False] * count
        self._expected = list(self._learned) if self._static and self._learned is not None else [1] * count
        self._next = 0
        self._reachable = set()
        for transfer in self._transfers:
            transfer.reset()

    def _on_output_gradient(self, gradient: Tensor) -> None:
        with self._lock, torch.no_grad():
            if self._armed and not self._begun:
                self._begin()

    def _begin(self) -> None:
        self._begun = True
        engine = torch.autograd.Variable._execution_engine
        if self._plan is None or self.native is not None:
            self._versions = self._gradient_versions() if self._ends_matter else []
            if self.native is not None and self.observers:
                self._observed.begin([i for i in range(len(self.names)) if self._reachable and i not in self._reachable])
            engine.queue_callback(self._native_computed)
            return
        engine.queue_callback(self._finish)
        self.cross_step.settle_all()
        for observer in tuple(self.observers):
            observer.on_backward_start()
        if self._find_unused and not self._static and self._reachable:
            self._expected = [int(position in self._reachable) for position in range(len(self.names))]
        if not self._late:
            for position, times in enumerate(self._expected):
                if times == 0:
                    self._fill(position)
            self._drain()

    @property
    def _ends_matter(self) -> bool:
        """Somebody wants to know when a backward pass that torch synchronizes has ended."""
        return bool(self.listeners) or self.cross_step.learning

    def _gradient_versions(self) -> list[int | None]:
        return [None if p.grad is None else p.grad._version for p in self.parameters]

    def _on_native_gradient(self, position: int, parameter: Tensor) -> None:
        """While a pass that torch's reducer synchronizes is observed."""
        if not self._armed:
            return
        with self._lock, torch.no_grad():
            if not self._begun:
                self._begin()
            self._observed.ready(position)

    def _native_computed(self) -> None:
        """End of a backward pass that torch synchronizes, before its reducer waits for its messages."""
        with torch.no_grad():
            self._observed.computed()
        # DDP queues its own end while the pass runs; queueing once more from the callback comes after it.
        torch.autograd.Variable._execution_engine.queue_callback(self._native_finished)

    def _native_finished(self) -> None:
        self._begun = False
        self._reachable = set()
        if self.native is not None:
            with torch.no_grad():
                self._observed.ended(self.native)
        if not self._ends_matter or self._gradient_versions() == self._versions:
            return  # torch.autograd.grad: gradients were computed but not accumulated
        self._armed = False
        self._end_backward()

    def _end_backward(self, gradients_final: bool = True) -> None:
        self._boundary_due = True
        self.cross_step.backward_ended(gradients_final)
        if self.listeners:
            now_s = self.device.now_s()
            for listener in tuple(self.listeners):
                listener.on_backward_end(now_s)

    @property
    def _late(self) -> bool:
        """Messages wait for the end of the pass: when profiling, and in the first pass of a static graph."""
        return self.deferred or (self._static and self._learned is None)

    def _on_gradient(self, position: int, parameter: Tensor) -> None:
        self._used[position] = True
        if not self._armed:
            return
        with self._lock, torch.no_grad() if torch.is_grad_enabled() else _NO_GRAD_ALREADY:
            if not self._begun:  # the module's output held no tensor that could be found
                self._begin()
            self._fired[position] += 1
            learning = self._static and self._learned is None
            if self._fired[position] > self._expected[position] and not learning:
                raise self._ready_again(position)
            if self._late:
                for observer in tuple(self.observers):
                    observer.on_ready(position, parameter.grad)
            elif self._fired[position] == self._expected[position] and self._fill(position):
                self._drain()

    def _ready_again(self, position: int) -> SynchronizationError:
        self._broken = f"the gradient of {self.names[position]!r} was accumulated again after it had been sent"
        return SynchronizationError(
            f"a gradient must become ready once in a backward pass, but that of {self.names[position]!r} did {self._fired[position]} "
            "times; use checkpoint(use_reentrant=False), or static_graph=True if the graph never changes"
        )

    def _fill(self, position: int) -> bool:
        """Pack the variable's local gradient, scaled by 1/w (zeros where there is none), and the small ones that waited for it.

        Whether a message is complete with it.
        """
        if self.observers and not self._late:
            gradient = self.parameters[position].grad
            for observer in tuple(self.observers):
                observer.on_ready(position, gradient)
        if self._packed_alone[position]:
            dense = self._dense(position)
            for part, view in self._packed_alone[position]:
                source = None if dense is None else slice_of(dense, part)
                pack_slice(source, 1.0 / self.ranks.size, self.residuals.waiting(part), out=view)
        if self._row_transfers[position]:
            rows = waiting_rows(self.parameters[position], 1.0 / self.ranks.size, self.residuals.of(self.names[position]))
            for rowed in self._row_transfers[position]:
                rowed.take(rows)
        self._filled[position] = True
        complete = False
        for transfer in self._transfers_of[position]:
            transfer.pending -= 1
            if transfer.pending == 0:
                complete = True
                if isinstance(transfer, Transfer) and transfer.batched:
                    self._pack_batched(transfer)
        return complete

    def _pack_batched(self, transfer: Transfer) -> None:
        sources: list[Tensor | None] = []
        packed, dense = "", None
        for number in transfer.batched:
            part = transfer.views[number][0]
            if part.variable != packed:  # the slices of a variable follow each other
                packed, dense = part.variable, self._dense(self._index[part.variable])
            sources.append(dense if dense is None or part.axis is None else slice_of(dense, part))
        transfer.pack(sources, 1.0 / self.ranks.size)

    def _dense(self, position: int) -> Tensor | None:
        gradient = self.parameters[position].grad
        return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient

    def _drain(self) -> None:
        """Issue in plan order whatever is complete."""
        while self._next < len(self._transfers) and self._transfers[self._next].pending == 0:
            try:
                self._transfers[self._next].issue()
            except SynchronizationError as error:
                self._broken = str(error)
                raise
            self._next += 1

    def _finish(self) -> None:
        """End of the backward pass: send what is left, wait for everything, write the averages into `.grad`."""
        self._begun = False
        if not any(self._fired):
            if any(self._filled):  # variables that are never used were packed ahead; nothing else happened
                self._reset_backward()
            return  # torch.autograd.grad: gradients were computed but not accumulated
        deferred = self.cross_step.defers and not self.observers and not self._late
        try:
            with torch.no_grad():
                missing = self._complete(deferred)
        except SynchronizationError as error:
            self._broken = str(error)
            raise
        if self._static and self._learned is None:
            self._learned = list(self._fired)
        self._armed = False
        self._used = [False] * len(self.names)
        self._reset_backward()
        if missing and not self._find_unused:
            raise self._unused(missing)
        self._end_backward(gradients_final=not deferred)

    def _complete(self, deferred: bool) -> list[int]:
        """Returns the variables that got no gradient in this pass. `deferred`: the messages are left under way."""
        for observer in tuple(self.observers):
            observer.on_computed()
        missing = [position for position, times in enumerate(self._fired) if times == 0]
        for position, filled in enumerate(self._filled):
            if not filled:
                self._fill(position)
        self._drain()
        assert self._next == len(self._transfers)
        kept = self._agree_on_unused() if self._find_unused else frozenset()
        for position in kept:
            for transfer in self._transfers_of[position]:
                transfer.take_back(self.names[position])
        self._present_rows.ask(self._votes)
        averaged = [position for position in range(len(self.names)) if position not in kept]
        if deferred:
            self.cross_step.defer(self._transfers, averaged)
            return missing
        for transfer in self._transfers:
            transfer.wait()
        self._unpack(averaged)
        for observer in tuple(self.observers):
            observer.on_synchronized(kept)
        return missing

    def _agree_on_unused(self) -> frozenset[int]:
        """Variables that no rank used since the last synchronization."""
        used = torch.tensor(self._used, dtype=torch.int32, device=self.device.device)
        try:
            dist.all_reduce(used, group=self._votes)
        except RuntimeError as error:
            raise SynchronizationError(f"the ranks must agree on unused parameters, but rank {self.ranks.rank} failed: {error}") from error
        return frozenset(position for position, ranks in enumerate(used.tolist()) if ranks == 0)

    def _unpack(self, positions: Iterable[int]) -> None:
        """Copy the averages of variables whose messages have arrived into their `.grad`."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        sparse: list[tuple[int, Tensor, Tensor]] = []
        for position in positions:
            parameter = self.parameters[position]
            if self._row_transfers[position]:
                write_average(parameter, self._row_transfers[position])
                continue
            gradient = parameter.grad
            if gradient is None:
                gradient = parameter.grad = torch.empty_like(parameter)
            dense = torch.empty_like(parameter) if gradient.is_sparse else gradient
            for part, view in self._slots[position]:
                targets.append(dense if part.axis is None else slice_of(dense, part))
                sources.append(view)
            if gradient.is_sparse:
                sparse.append((position, gradient, dense))
        if targets:
            torch._foreach_copy_(targets, sources)
        for position, gradient, dense in sparse:
            gradient.copy_(self._present_rows.only(position, dense))

    def _unused(self, missing: list[int]) -> SynchronizationError:
        names = ", ".join(self.names[position] for position in missing[:5])
        self._broken = f"parameters without a gradient: {names}"
        return SynchronizationError(
            f"every parameter must receive a gradient in each synchronized backward pass, but {len(missing)} did not: {names}; make every "
            "output of forward take part in the loss, or pass find_unused_parameters=True"
        )
