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

from collections.abc import Callable, Mapping, Sequence
from threading import Lock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autotune.errors import AutotuneError, InvalidStrategy, SynchronizationError
from autotune.strategy_space.enactable import scaled_refusal_reason
from autotune.strategy_space.plan import Plan
from runtime_rewriter.pytorch.agreement import agree, check_fit
from runtime_rewriter.pytorch.autograd import reachable_variables, tensors_with_graph
from runtime_rewriter.pytorch.cross_step import CrossStepUpdates
from runtime_rewriter.pytorch.exchange.device import Device
from runtime_rewriter.pytorch.exchange.lanes import Lanes
from runtime_rewriter.pytorch.exchange.ranks import SynchronizerGroups, Timeouts
from runtime_rewriter.pytorch.garbage import freeze_garbage, thaw_garbage
from runtime_rewriter.pytorch.gradient_hooks import (
    OPTIMIZER_INSIDE,
    GradientHooks,
    optimizers_inside,
    requiring_gradients,
)
from runtime_rewriter.pytorch.loss_scales import LossScales
from runtime_rewriter.pytorch.native_buckets import Backend, BucketReducer, Buckets, ModuleBackend
from runtime_rewriter.pytorch.native_observation import ObservedPass
from runtime_rewriter.pytorch.observers import Accelerator
from runtime_rewriter.pytorch.packing import Packing, build_norms, build_transfers
from runtime_rewriter.pytorch.planned_pass import PlannedPass, interrupted
from runtime_rewriter.pytorch.synchronized_model import SynchronizedModel

BACKWARD_INSIDE = "backward() runs inside the forward pass (Lightning's manual optimization)"


class GradientSynchronizer(SynchronizedModel):
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
        super().__init__(
            module,
            process_group,
            Timeouts(timeout_s, agreement_timeout_s),
            lanes=lanes,
            on_byte_scale=on_byte_scale,
            summed=summed,
        )
        self._find_unused, self._static = find_unused_parameters, static_graph
        self.refusal_reason = refusal_reason
        self.emulation_refusal = emulation_refusal or refusal_reason
        self.backend: Backend = backend or ModuleBackend(module, enabled=False)
        self.buffers = buffers
        self._plan: Plan | None = None
        self._observed = ObservedPass(
            self.names,
            self.parameters,
            self.observers,
            ends_matter=self._ends_matter,
            on_gradient=self._on_native_gradient,
            on_end=self._native_finished,
        )
        self._hooks = GradientHooks(self.parameters, self._on_gradient)
        self._lock = Lock()
        self._broken: str | None = None
        self._reachable: set[int] = set()
        self._backward_inside = False
        self._requested = False  # whether the last forward pass was to be synchronized
        self._armed = self._begun = False
        self._packing: Packing | None = None
        self.cross_step = CrossStepUpdates(self.parameters, self.device, self._write)
        self._loss_scales = LossScales(self.named, self.residuals, self.cross_step.flush)
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
    def plan(self) -> Plan | None:
        """The loaded plan; None: this object does nothing on backward."""
        return self._plan

    @property
    def native(self) -> BucketReducer | None:
        """torch's reducer, if it executes the plan."""
        return self._observed.reducer

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
        named = self.named
        buckets, error = self._checked(plan, deferred)
        agree(self.ranks, plan, error, self.byte_scale, self.residuals.in_use)
        ours = plan if buckets is None else None
        transfers = build_transfers(ours, named, self.residuals, self.lanes, self.byte_scale)
        packing = Packing(
            self.names, self.parameters, transfers, self.residuals, self.divisor, self.sparse
        )
        norms = build_norms(plan, named, transfers, self.lanes)
        crossing = plan is not None and plan.cross_step
        # On the messages' own group a vote would wait for messages that cross the step, or have
        # no order with those that start on a thread.
        apart = crossing or (plan is not None and plan.direct)
        voting = apart and (self._find_unused or bool(self.sparse))
        votes = self.lanes.votes() if voting else self.ranks.first
        self._unhook()
        self.lanes.trim()
        if buckets is not None:
            self._observed.reducer = self._install(buckets, named)
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
            if not deferred and not self.residuals.in_use:
                return self.backend.buckets_of(plan), None
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
        reason = self.cross_step.conditions.refusal_reason(norms) if plan.cross_step else None
        if reason is not None:
            raise InvalidStrategy(
                f"plan {plan.id} cannot be enacted: synchronization cannot cross the step, since "
                f"{reason}"
            )
        check_fit(plan, self.named, self.ranks.size)

    def _write(self, gradients: Mapping[int, Tensor | None]) -> None:
        """Write averages that arrived after the step."""
        assert self._packing is not None
        self._packing.write(gradients)

    def _install(self, buckets: Buckets, named: Mapping[str, nn.Parameter]) -> BucketReducer:
        try:
            with requiring_gradients(self.parameters):
                return self.backend.install(buckets, named, self.ranks.first, self.byte_scale)
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
        self.cross_step.conditions.forget_reads()
        self.cross_step.updates_played = False
        self.cross_step.before_wait = None if accelerator is None else accelerator.before_wait
        if self.accelerator is not None:
            self.listeners.remove(self.accelerator)
        if accelerator is not None:
            self.listeners.insert(0, accelerator)
        self.accelerator = accelerator

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
        self.backend.release()

    def _check_usable(self) -> None:
        broken = self._broken or self.cross_step.broken
        if broken is not None:
            raise SynchronizationError(
                f"after a failed synchronization the ranks must be started again: {broken}"
            )

    # -- forward

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
            if self._observed.waits:
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
        if not self._armed or (self._plan is None and not self._ends_matter()):
            return
        tensors = tensors_with_graph(output)
        for tensor in tensors:
            tensor.register_hook(self._on_output_gradient)
        self._observed.prepare()
        if self._plan is None or (self.native is not None and not self.observers):
            return
        if self._find_unused and not self._static and self._requested:
            self._reachable |= reachable_variables(tensors, self.index_of)
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
        self._observed.waits = False
        self._hooks.come_last()
        if self._plan is None or self.native is not None:
            self._observed.begin(self._reachable)
            return
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        if not self._pass.under_way:
            self._pass.begin(self._reachable)

    def _ends_matter(self) -> bool:
        """Whether anyone needs to know when a backward pass that torch synchronizes has ended."""
        return bool(self.listeners) or self.cross_step.conditions.learning

    def _on_native_gradient(self, position: int, parameter: Tensor) -> None:
        """Run while a pass that torch's reducer synchronizes is observed."""
        if not self._armed:
            return
        with self._lock, torch.no_grad():
            if not self._begun:
                self._begin()
            self._observed.ready(position)

    def _native_finished(self) -> None:
        """Run when torch has written its averages."""
        self._begun = False
        self._reachable = set()
        if self._observed.finish():
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
