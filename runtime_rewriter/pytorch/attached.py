"""Plans on a plain module: hooks on its forward pass do what DDP's forward does."""

# mypy: allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _broadcast_coalesced
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.utils import _sync_module_states, _verify_param_shape_across_processes
from torch.utils.hooks import RemovableHandle

from autotune.errors import SynchronizationError
from autotune.strategy_space.plan import Plan
from runtime_rewriter.pytorch.byte_scale import parts_of
from runtime_rewriter.pytorch.gradient_hooks import OPTIMIZER_INSIDE, GradientHooks
from runtime_rewriter.pytorch.hooks import GradientSynchronizer
from runtime_rewriter.pytorch.local_gradients import LocalGradients
from runtime_rewriter.pytorch.module_hooks import ModuleHook
from runtime_rewriter.pytorch.native_buckets import ModuleBackend
from runtime_rewriter.pytorch.observers import Accelerator

BROADCAST_BYTES = 250 * 2**20  # as torch's DDP


class HookedSynchronizer(GradientSynchronizer, ABC):
    """A synchronizer that hooks on the module's forward pass drive."""

    def __init__(self, module: nn.Module, *arguments: Any, **options: Any) -> None:
        super().__init__(module, *arguments, **options)
        self._own_forward: dict[str, Any] | None = None  # while an accelerator replaces it
        self._forward_handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(ModuleHook(self._before), prepend=True),
            module.register_forward_hook(ModuleHook(self._after)),
        ]

    @abstractmethod
    def _before(self, module: nn.Module, inputs: object) -> None: ...

    @abstractmethod
    def _after(self, module: nn.Module, inputs: object, output: object) -> None: ...

    def close(self) -> None:
        for handle in self._forward_handles:
            handle.remove()
        self.emulate(None)
        super().close()

    def emulate(self, accelerator: Accelerator | None) -> None:
        """Replace the module's own `forward`, or restore it."""
        super().emulate(accelerator)
        # Not setattr: a compiled module passes that on to the module inside.
        attributes = self.module.__dict__
        if self._own_forward is not None:
            attributes.pop("forward")
            attributes.update(self._own_forward)
            self._own_forward = None
        if accelerator is not None:
            forward = self.module.forward
            present = "forward" in attributes
            self._own_forward = {"forward": attributes["forward"]} if present else {}
            attributes["forward"] = lambda *inputs, **kwargs: self.compute(forward, inputs, kwargs)


class AttachedSynchronizer(HookedSynchronizer):
    """The synchronizer of a plain module.

    Only a DDP can drive a reducer that finds unused parameters or learns a static graph.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None,
        broadcast_buffers: bool,
        **options: Any,
    ) -> None:
        simple = not (options.get("find_unused_parameters") or options.get("static_graph"))
        self._driven = ModuleBackend(module, enabled=simple)
        super().__init__(
            module, process_group, backend=self._driven, buffers=self._sent_buffers, **options
        )
        self._broadcast_buffers = broadcast_buffers
        self._sync_next = True
        self._ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._forward_seen = False  # since the plan was loaded
        self._local = LocalGradients(len(self.parameters))
        # Under torch's reducer: a call's backward pass is to come, or under way.
        self._to_come = self._under_way = False
        # Most passes reach the first or the last parameter. Hooks on all would cost what torch's
        # reducer saves.
        self._ends = tuple(dict.fromkeys((0, len(self.parameters) - 1)))
        self._end_hooks = GradientHooks(
            [self.parameters[position] for position in self._ends], self._on_end_gradient
        )
        self.cross_step.check_step = self._check_step

    def load(self, plan: Plan | None, *, deferred: bool = False) -> None:
        super().load(plan, deferred=deferred)
        self._forward_seen = self._to_come = self._under_way = False
        self._local = LocalGradients(len(self.parameters))
        self._end_hooks.remove()
        if self.native is not None:
            self._end_hooks.register()

    def close(self) -> None:
        self._end_hooks.remove()
        super().close()

    def _check_step(self, numbers: Mapping[int, int]) -> None:
        """Refuse a step on gradients of a backward pass that was not synchronized."""
        if self.plan is None or not self._synchronizing:
            return
        if self._begun and torch._C._current_graph_task_id() != -1:
            raise SynchronizationError(OPTIMIZER_INSIDE)
        stepped = [n for n, parameter in enumerate(self.parameters) if id(parameter) in numbers]
        local = self._local.take(stepped)
        self._refuse_local(local if self._forward_seen else stepped)

    def _refuse_local(self, positions: Iterable[int]) -> None:
        gradients = {self.names[position]: self.parameters[position].grad for position in positions}
        # Zeros, by which tools for checkpoints make optimizers create their state, are the same
        # on all ranks.
        local = [
            name
            for name, gradient in gradients.items()
            if gradient is not None and torch.count_nonzero(_dense_values(gradient))
        ]
        if local:
            raise SynchronizationError(
                "each backward pass must follow a call of the model itself, model(x), but an "
                f"optimizer steps with gradients of {', '.join(sorted(local)[:3])} that follow "
                "none; call the model: its methods and .forward bypass synchronization; if these "
                "gradients are the same on all ranks, step inside no_sync()"
            )

    def _on_local_gradient(self, position: int) -> None:
        if self._requested and self._synchronizing:
            self._local.accumulated(position)

    def _on_end_gradient(self, end: int, parameter: torch.Tensor) -> None:
        """Run under a plan of torch's reducer, which synchronizes the first pass after a call."""
        if not self._to_come:
            self._on_local_gradient(self._ends[end])
        elif not self._under_way:
            self._under_way = True
            torch.autograd.Variable._execution_engine.queue_callback(self._reduced)

    def _reduced(self) -> None:
        self._to_come = self._under_way = False
        self._local.synchronized()

    def _end_backward(self, gradients_final: bool = True) -> None:
        self._local.synchronized()
        super()._end_backward(gradients_final)

    def _before(self, module: nn.Module, inputs: object) -> None:
        training = torch.is_grad_enabled()
        if training:
            self.before_forward(self._synchronizing)
        else:
            self.before_evaluation()
        buffers = self._sent_buffers()
        if self.plan is not None and self._sync_next and buffers:
            with torch.no_grad(), _unsafe_preserve_version_counter(tuple(buffers)):
                _broadcast_coalesced(
                    self.process_group, parts_of(buffers, self.byte_scale), BROADCAST_BYTES, 0
                )
        self._sync_next = training and self._synchronizing
        if training:
            self._driven.before_forward(self._synchronizing)
            self._forward_seen = True
            self._to_come |= self._synchronizing
            self._under_way = False  # an exception may have ended the last pass
            self.forward_starts()

    def _sent_buffers(self) -> list[torch.Tensor]:
        if not self._broadcast_buffers:
            return []
        return [buffer for name, buffer in self.module.named_buffers() if name not in self._ignored]

    def _after(self, module: nn.Module, inputs: object, output: object) -> None:
        if torch.is_grad_enabled():
            self._driven.after_forward(self._synchronizing)
            self.after_forward(output)


def _dense_values(gradient: Any) -> Any:
    return gradient._values() if gradient.is_sparse else gradient


def attach(
    module: nn.Module,
    plan: Plan | None,
    *,
    process_group: dist.ProcessGroup | None = None,
    timeout_s: float = 60.0,
    agreement_timeout_s: float = 20.0,
    find_unused_parameters: bool = False,
    static_graph: bool = False,
    broadcast_buffers: bool = True,
) -> GradientSynchronizer:
    """Synchronize a module that no DDP wraps. Collective.

    Like DDP, it checks that all ranks' parameters have the same shapes, and sends parameters and
    buffers from rank 0. Before forward passes it sends the buffers again. Raises what
    `GradientSynchronizer.load` raises.
    """
    synchronizer = AttachedSynchronizer(
        module,
        process_group,
        broadcast_buffers,
        timeout_s=timeout_s,
        agreement_timeout_s=agreement_timeout_s,
        find_unused_parameters=find_unused_parameters,
        static_graph=static_graph,
    )
    try:
        synchronizer.load(plan)
    except BaseException:
        synchronizer.close()
        raise
    _verify_param_shape_across_processes(synchronizer.process_group, list(synchronizer.parameters))
    _sync_module_states(
        module=module,
        process_group=synchronizer.process_group,
        broadcast_bucket_size=BROADCAST_BYTES,
        src=0,
        params_and_buffers_to_ignore=synchronizer._ignored,
        broadcast_buffers=broadcast_buffers,
    )
    return synchronizer


def attached_to(module: nn.Module) -> GradientSynchronizer | None:
    """The synchronizer that `attach` created for this module, or None."""
    owners = (
        hook.owner for hook in module._forward_pre_hooks.values() if isinstance(hook, ModuleHook)
    )
    return next((owner for owner in owners if isinstance(owner, GradientSynchronizer)), None)
