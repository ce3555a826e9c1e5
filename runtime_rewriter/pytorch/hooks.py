"""Gradient synchronization by a plan, from hooks on the parameters.

A gradient is packed when it is final; small ones are packed together with the others of their
message. A message is issued, in plan order, once all of its slices are packed. This happens inside
the backward pass, so communication overlaps computation. The backward pass ends (a callback of the
autograd engine) when every message has arrived and every `.grad` holds the average.

Without a plan there are no hooks, and the module's own synchronization, if any, runs untouched.
There are none either under a plan of mere buckets if a `Backend` lets a reducer of torch execute
it.

Gradients count as in torch's DDP. Under accumulation only the last backward pass synchronizes. With
`find_unused_parameters` a parameter that no rank used keeps its `.grad`.
"""

# mypy: untyped-calls-exclude=torch, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autotune.errors import AutotuneError, InvalidStrategy, SynchronizationError
from autotune.strategy_space.enactable import scaled_refusal_reason
from autotune.strategy_space.plan import Plan
from autotune.workload import Library, Workload
from runtime_rewriter.emulation import Timetable
from runtime_rewriter.pytorch.agreement import agree, check_fit, trainable_parameters, workload_of
from runtime_rewriter.pytorch.autograd import by_identity, reachable_variables, tensors_with_graph
from runtime_rewriter.pytorch.cross_step import CrossStepUpdates
from runtime_rewriter.pytorch.exchange.device import Device
from runtime_rewriter.pytorch.exchange.lanes import Lanes
from runtime_rewriter.pytorch.exchange.norms import NormExchange
from runtime_rewriter.pytorch.exchange.present_rows import sparse_parameters
from runtime_rewriter.pytorch.exchange.ranks import SynchronizerGroups
from runtime_rewriter.pytorch.exchange.residuals import Residuals
from runtime_rewriter.pytorch.exchange.row_transfer import RowTransfer
from runtime_rewriter.pytorch.exchange.transfer import Transfer
from runtime_rewriter.pytorch.garbage import freeze_garbage, thaw_garbage
from runtime_rewriter.pytorch.gradient_hooks import (
    OPTIMIZER_INSIDE,
    GradientHooks,
    optimizers_inside,
    requiring_gradients,
)
from runtime_rewriter.pytorch.loss_scales import LossScales
from runtime_rewriter.pytorch.native_buckets import Backend, BucketReducer, Buckets
from runtime_rewriter.pytorch.native_observation import ObservedPass
from runtime_rewriter.pytorch.observers import Accelerator, BackwardObserver, StepListener
from runtime_rewriter.pytorch.packing import Packing, build_transfers
from runtime_rewriter.pytorch.planned_pass import PlannedPass, interrupted
from runtime_rewriter.pytorch.step_boundaries import StepBoundaries

BACKWARD_INSIDE = "backward() runs inside the forward pass (Lightning's manual optimization)"


class GradientSynchronizer:
    """Synchronizes the gradients of `module` over `process_group` by the loaded plan.

    Building one is collective over the group, as building a DDP is. `timeout_s` bounds every
    message, and `agreement_timeout_s` how long ranks wait for each other in `load`. `static_graph`
    as in DDP: the set of used parameters never changes, and the first backward pass learns how
    often each is accumulated. `refusal_reason` returns why the module's wrapper forbids all plans,
    and `emulation_refusal` why it forbids emulated accelerators (by default for the same reason).
    `on_byte_scale` scales the bytes that the wrapper itself sends. `backend` lets the wrapper drive
    a reducer of torch. `buffers` returns the buffers that rank 0 sends before forward passes.
    `lanes` builds the lanes on which messages travel. With `summed` gradients are summed instead of
    averaged. With `unused_as_zeros` a parameter without a gradient counts as zeros.
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
        refusal_reason: Callable[[], str | None] = lambda: None,
        emulation_refusal: Callable[[], str | None] | None = None,
        on_byte_scale: Callable[[float], None] = lambda byte_scale: None,
        backend: Backend | None = None,
        buffers: Callable[[], Sequence[Tensor]] = lambda: (),
        lanes: Callable[[SynchronizerGroups, Device], Lanes] = Lanes,
        summed: bool = False,
        unused_as_zeros: bool = False,
    ) -> None:
        self.module = module
        named = trainable_parameters(module)
        self.names: tuple[str, ...] = tuple(named)
        self.parameters: tuple[nn.Parameter, ...] = tuple(named.values())
        self.device = Device(self.parameters[0].device)
        self.ranks = SynchronizerGroups.of(
            process_group, timeout_s, agreement_timeout_s, self.device.device
        )
        self.lanes = lanes(self.ranks, self.device)
        self.divisor = 1 if summed else self.ranks.size
        """Divides the sums of all ranks' gradients."""
        self.residuals = Residuals(named, self.ranks.rank, self.ranks.size)
        self.world: Callable[[], AbstractContextManager[object]] = nullcontext
        """Inside it, torch's functions find the ranks of the job."""
        self.listeners: list[StepListener] = []
        self.boundaries = StepBoundaries(self.listeners)
        self.observers: list[BackwardObserver] = []
        self.library = Library.DDP
        self.records_graph = False
        """Whether steps are recorded as a graph of TensorFlow, not as operators of torch."""
        self.accelerator_of: Callable[[Any, Timetable | None], Any] | None = None
        """Builds an emulated accelerator of this model; None: that of a module of torch."""
        self.accelerator: Accelerator | None = None  # None: the module itself computes
        self.byte_scale = 1.0
        self._find_unused, self._static = find_unused_parameters, static_graph
        self.refusal_reason = refusal_reason
        self.emulation_refusal = emulation_refusal or refusal_reason
        self._on_byte_scale = on_byte_scale
        self._backend = backend
        self.buffers = buffers
        self._index_of = by_identity(self.parameters)
        sparse = sparse_parameters(module)
        self._sparse = [p for p, parameter in enumerate(self.parameters) if parameter in sparse]
        self._plan: Plan | None = None
        self.native: BucketReducer | None = None  # torch's reducer, if it executes the plan
        self._observed = ObservedPass(
            self.names, self.parameters, self.observers, self._on_native_gradient
        )
        self._hooks = GradientHooks(self.parameters, self._on_gradient)
        self._lock = Lock()
        self._broken: str | None = None
        self._synchronizing = True
        self._reachable: set[int] = set()
        self._versions: list[int | None] = []
        self._backward_inside = False
        self._requested = False  # whether the last forward pass was to be synchronized
        self._armed = self._begun = False
        self._native_waits = False  # torch's reducer waits for its messages
        self._packing: Packing | None = None
        self.cross_step = CrossStepUpdates(self.parameters, self.device, self._write)
        self._loss_scales = LossScales(named, self.residuals, self.cross_step.flush)
        self._pass = PlannedPass(
            self.names,
            self.parameters,
            self.observers,
            self.cross_step,
            self._loss_scales,
            find_unused=find_unused_parameters,
            static=static_graph,
            unused_as_zeros=unused_as_zeros,
        )

    # -- plans

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The script's group over which gradients are averaged."""
        return self.ranks.base

    @property
    def restarts(self) -> int:
        """How often a plan made the ranks restart their communication library."""
        return 0

    @property
    def model_id(self) -> str:
        """`Workload.id` of the module, which plans that fit it carry, too."""
        return self.workload.id

    @property
    def workload(self) -> Workload:
        """The synchronized variables in reverse definition order, without measurements.

        They stay the same if the script freezes some, or adds others, as in DDP.
        """
        return workload_of(type(self.module).__name__, self._named)

    @property
    def _named(self) -> dict[str, nn.Parameter]:
        return dict(zip(self.names, self.parameters, strict=True))

    @property
    def plan(self) -> Plan | None:
        """The loaded plan; None: this object does nothing on backward."""
        return self._plan

    @property
    def direct_refused(self) -> str:
        """Why no plan with direct exchanges is proposed here ("" if one is)."""
        on_cpu = self.device.device.type == "cpu"
        return "" if on_cpu or self.lanes.queued else "gloo cannot send between GPUs; use NCCL"

    @property
    def own_buckets(self) -> Buckets | None:
        """The variables of each bucket of the module's own reducer, in its order, without a
        plan."""
        return None if self._backend is None else self._backend.own_buckets()

    def rebuilt_buckets(self, ready: Sequence[str]) -> Buckets | None:
        """The same after the next rebuild, if gradients become ready in this order."""
        return None if self._backend is None else self._backend.rebuilt_buckets(ready)

    @property
    def bucket_view(self) -> bool | None:
        """Whether gradients are views of the buckets of the module's own reducer, under any plan.

        None if the module has no reducer.
        """
        return None if self._backend is None else self._backend.bucket_view

    def load(self, plan: Plan | None, *, deferred: bool = False) -> None:
        """Synchronize by `plan` from now on, or not at all. Collective, between two steps.

        `deferred`: messages are issued after the backward pass, so that none disturbs it
        (profiling). All ranks succeed or all raise: `InvalidStrategy` (cannot be enacted),
        `ModelMismatch` (for another model or world size), `PlanMismatch` (ranks hold different
        plans), `SynchronizationError` (a rank is gone). After an error the earlier plan is still
        loaded.
        """
        self._check_usable()
        self.cross_step.flush()
        named = self._named
        buckets, error = self._checked(plan, deferred)
        agree(self.ranks, plan, error, self.byte_scale, self.residuals.in_use)
        transfers: list[Transfer | RowTransfer] = []
        if plan is not None and buckets is None:
            transfers = build_transfers(plan, named, self.residuals, self.lanes, self.byte_scale)
        packing = Packing(
            self.names, self.parameters, transfers, self.residuals, self.divisor, self._sparse
        )
        norms = None
        if plan is not None and plan.results is not None:
            dense = [transfer for transfer in transfers if isinstance(transfer, Transfer)]
            norms = NormExchange(named, dense, self.lanes)
        crossing = plan is not None and plan.cross_step
        # On the messages' own group a vote would wait for messages that cross the step, or have
        # no order with those that start on a thread.
        apart = crossing or (plan is not None and plan.direct)
        voting = apart and (self._find_unused or bool(self._sparse))
        votes = self.lanes.votes() if voting else self.ranks.first
        self._unhook()
        self.lanes.trim()
        self.native = None if buckets is None else self._install(buckets, named)
        self._plan, self._packing = plan, packing
        self.residuals.plan_loaded(plan)
        self.lanes.limit = None if plan is None else plan.limit
        self.lanes.direct_limit = plan.in_flight if plan is not None and plan.direct else None
        results = () if plan is None else plan.results or ()
        self._pass.load(transfers, packing, votes, deferred, results, norms)
        self._reachable = set()
        self.cross_step.enable(packing.messages_of if crossing else None, norms)
        if plan is not None and self.native is None:
            self._hook()
        if crossing:
            freeze_garbage()
        else:
            thaw_garbage()

    def _checked(
        self, plan: Plan | None, deferred: bool
    ) -> tuple[Buckets | None, AutotuneError | None]:
        """The buckets by which a reducer of torch enacts the plan (None: our hooks do), or why
        none can."""
        if plan is None:
            return None, None
        try:
            self._check_plan(plan)
            # Residuals can only travel in our own messages.
            if self._backend is not None and not deferred and not self.residuals.in_use:
                return self._backend.buckets_of(plan), None
        except AutotuneError as error:
            return None, error
        return None, None

    def _check_plan(self, plan: Plan) -> None:
        reason = (
            self.refusal_reason()
            or (BACKWARD_INSIDE if self._backward_inside else "")
            or (OPTIMIZER_INSIDE if optimizers_inside(self.parameters) else "")
            or (self.direct_refused if plan.direct else "")
            or scaled_refusal_reason(plan, self.byte_scale)
        )
        if reason is not None:
            raise InvalidStrategy(f"plans cannot be enacted here: {reason}")
        norms = plan.results is not None
        reason = self.cross_step.refusal_reason(norms) if plan.cross_step else None
        if reason is not None:
            raise InvalidStrategy(
                f"plan {plan.id} cannot be enacted: synchronization cannot cross the step, since "
                f"{reason}"
            )
        check_fit(plan, self._named, self.ranks.size)

    def _write(self, gradients: Mapping[int, Tensor | None]) -> None:
        """Write averages that arrived after the step."""
        assert self._packing is not None
        self._packing.write(gradients)

    def _install(self, buckets: Buckets, named: Mapping[str, nn.Parameter]) -> BucketReducer:
        assert self._backend is not None
        try:
            with requiring_gradients(self.parameters):
                return self._backend.install(buckets, named, self.ranks.first, self.byte_scale)
        except RuntimeError as error:
            self._broken = str(error)
            raise SynchronizationError(
                f"all ranks must build the same buckets, but rank {self.ranks.rank} failed: {error}"
            ) from error

    def forget_residuals(self) -> None:
        """Drop the residuals of compressed messages; between two steps, on every rank."""
        self.cross_step.flush()
        self.residuals.clear()

    def emulate(self, accelerator: Accelerator | None) -> None:
        """Let `accelerator` replace the module's computation, or end that. Local, between steps."""
        self.cross_step.flush()
        self.cross_step.forget_reads()
        self.cross_step.updates_played = False
        self.cross_step.before_wait = None if accelerator is None else accelerator.before_wait
        if self.accelerator is not None:
            self.listeners.remove(self.accelerator)
        if accelerator is not None:
            self.listeners.insert(0, accelerator)
        self.accelerator = accelerator

    def scale_bytes(self, byte_scale: float) -> None:
        """Send only 1/`byte_scale` of all bytes from now on. Local, between two steps.

        A plan follows when it is next loaded. Only the elements that travelled are averages.
        Raises `InvalidInput` if the wrapper cannot do it.
        """
        self._on_byte_scale(byte_scale)
        self.byte_scale = byte_scale

    def close(self) -> None:
        """Remove every hook, stop the threads and destroy our process groups. Local."""
        try:
            self.cross_step.flush()
        finally:
            self.cross_step.close()
            self._loss_scales.close()
            self._unhook()
            thaw_garbage()
            self._plan, self._packing = None, None
            self.listeners.clear()
            self.observers.clear()
            self.lanes.close()
            self.ranks.destroy()

    def _hook(self) -> None:
        """Follow the gradients of backward passes under the plan, until `_unhook`."""
        self._hooks.register()

    def _unhook(self) -> None:
        self._hooks.remove()
        self.lanes.stop()
        self._observed.close()
        self.native = None
        if self._backend is not None:
            self._backend.release()

    def _check_usable(self) -> None:
        broken = self._broken or self.cross_step.broken
        if broken is not None:
            raise SynchronizationError(
                f"after a failed synchronization the ranks must be started again: {broken}"
            )

    # -- forward

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients inside without synchronizing them. For plain modules: a DDP has its
        own."""
        before, self._synchronizing = self._synchronizing, False
        try:
            yield
        finally:
            self._synchronizing = before

    @torch.compiler.disable
    def before_forward(self, synchronize: bool) -> None:
        """Call first in every forward pass with gradients; `synchronize` its backward pass or
        not."""
        self._check_usable()
        if self._plan is not None and optimizers_inside(self.parameters):
            raise InvalidStrategy(f"plan {self._plan.id} cannot be enacted: {OPTIMIZER_INSIDE}")
        self._end_last_pass()
        self.boundaries.forward_begins(self.module.training, self.accelerator, self.device.now_s)
        self._hooks.come_last()
        self.cross_step.forward_begins(observable=self.accelerator is None)
        self._requested = synchronize

    def _end_last_pass(self) -> None:
        if self._pass.under_way:
            raise self._pass.unfinished()
        if self.native is not None and self._begun:
            if self._native_waits:
                raise interrupted()
            # An exception may have ended the pass before it accumulated anything, or this forward
            # pass is a checkpoint's inside it. The reducer knows.
            try:
                self.native.reducer._rebuild_buckets()
            except RuntimeError as error:
                raise interrupted() from error
        self._begun = False

    @property
    def synchronizing(self) -> bool:
        """Whether the last forward pass was to be synchronized."""
        return self._requested

    @torch.compiler.disable(recursive=False)
    def compute(
        self, call: Callable[..., Any], inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the module's part of a forward pass: `call(*inputs, **kwargs)`, or its emulation."""
        accelerator = self.accelerator
        if accelerator is None or not torch.is_grad_enabled():
            return call(*inputs, **kwargs)
        return accelerator.run(call, inputs, kwargs)

    @torch.compiler.disable
    def forward_starts(self) -> None:
        """Call before the module computes in a forward pass with gradients, after buffers are
        sent."""
        for observer in tuple(self.observers):
            observer.on_forward_start()

    @torch.compiler.disable
    def after_forward(self, output: object, still_requested: bool = True) -> None:
        """Call last in every forward pass with gradients: find where its backward pass starts.

        `still_requested`: the script has not decided during the pass against synchronizing it.
        """
        self.cross_step.forward_ended()
        if self._requested and not still_requested:
            self._end_backward_inside()
            return
        # As in DDP, a forward pass under no_sync() leaves an earlier one to be synchronized.
        self._armed |= self._requested
        if not self._armed or (self._plan is None and not self._ends_matter):
            return
        tensors = tensors_with_graph(output)
        for tensor in tensors:
            tensor.register_hook(self._on_output_gradient)
        if self.native is not None:
            self._observed.prepare()
        if self._plan is None or (self.native is not None and not self.observers):
            return
        if self._find_unused and not self._static and self._requested:
            self._reachable |= reachable_variables(tensors, self._index_of)
        for observer in tuple(self.observers):
            observer.on_forward_output(tensors)

    def _end_backward_inside(self) -> None:
        """End a step whose backward pass the script ran in the forward pass, by DDP's reducer."""
        self._backward_inside = True
        if self._plan is not None:
            raise InvalidStrategy(f"plan {self._plan.id} cannot be enacted: {BACKWARD_INSIDE}")
        self.boundaries.due = True
        self.boundaries.backward_ended()

    @torch.compiler.disable
    def before_evaluation(self) -> None:
        """Call first in a forward pass without gradients."""
        self.mark_unclean()
        self.cross_step.flush()

    def mark_unclean(self) -> None:
        """Note that this step is not pure training: it has a forward pass without gradients,
        say."""
        self.boundaries.mark_unclean()

    # -- backward

    def _on_output_gradient(self, gradient: Tensor) -> None:
        with self._lock, torch.no_grad():
            if not self._armed:
                self.cross_step.flush()  # gradients under way are accumulated into once more
            elif not self._begun:
                try:
                    self._begin()
                except SynchronizationError as error:
                    self._broken = str(error)
                    raise

    def _begin(self) -> None:
        self._begun = True
        self._native_waits = False
        self._hooks.come_last()
        engine = torch.autograd.Variable._execution_engine
        if self._plan is None or self.native is not None:
            self._versions = self._gradient_versions() if self._ends_matter else []
            if self.native is not None and self.observers:
                everything = range(len(self.names)) if self._reachable else ()
                self._observed.begin([i for i in everything if i not in self._reachable])
            engine.queue_callback(self._native_computed)
            return
        engine.queue_callback(self._finish)
        if not self._pass.under_way:
            self._pass.begin(self._reachable)

    @property
    def _ends_matter(self) -> bool:
        """Whether anyone needs to know when a backward pass that torch synchronizes has ended."""
        return bool(self.listeners) or self.cross_step.learning

    def _gradient_versions(self) -> list[int | None]:
        return [None if p.grad is None else p.grad._version for p in self.parameters]

    def _on_native_gradient(self, position: int, parameter: Tensor) -> None:
        """Run while a pass that torch's reducer synchronizes is observed."""
        if not self._armed:
            return
        with self._lock, torch.no_grad():
            if not self._begun:
                self._begin()
            self._observed.ready(position)

    def _native_computed(self) -> None:
        """Run when torch's backward pass has ended, before its reducer waits for its messages."""
        with torch.no_grad():
            self._observed.computed()
        self._native_waits = True
        # DDP queues its own end during the pass; a callback queued from here runs after it.
        torch.autograd.Variable._execution_engine.queue_callback(self._native_finished)

    def _native_finished(self) -> None:
        self._begun = self._native_waits = False
        self._reachable = set()
        if self.native is not None:
            with torch.no_grad():
                self._observed.ended(self.native)
        if not self._ends_matter or self._gradient_versions() == self._versions:
            return  # torch.autograd.grad: gradients were computed but not accumulated
        self._armed = False
        self._end_backward()

    def _end_backward(self, gradients_final: bool = True) -> None:
        self.boundaries.due = True
        self.cross_step.backward_ended(gradients_final)
        self.boundaries.backward_ended()

    def _on_gradient(self, position: int, parameter: Tensor) -> None:
        self._pass.note_use(position)
        if not self._armed:
            self._on_local_gradient(position)
            return
        with self._lock:
            if torch.is_grad_enabled():  # create_graph=True
                with torch.no_grad():
                    self._gradient_ready(position)
            else:
                self._gradient_ready(position)

    def _on_local_gradient(self, position: int) -> None:
        """Run when a backward pass that is not synchronized has accumulated a gradient."""

    def _gradient_ready(self, position: int) -> None:
        try:
            if not self._begun:  # no tensor was found in the module's output
                self._begin()
            self._pass.ready(position)
        except SynchronizationError as error:
            self._broken = str(error)
            raise

    def _finish(self) -> None:
        """Run at the end of a backward pass under our own hooks."""
        self._begun = False
        try:
            with torch.no_grad():
                gradients_final = self._pass.finish()
        except SynchronizationError as error:
            self._broken = str(error)
            raise
        if self._pass.under_way:
            return
        self._reachable = set()
        if gradients_final is not None:
            self._armed = False
            self._end_backward(gradients_final)
