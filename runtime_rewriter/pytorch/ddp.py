"""torch's DistributedDataParallel with plans.

`PlannedDataParallel` is a DDP. Without a plan every call goes to torch's own code with the user's
own arguments, so the baseline is measured as it is. With a plan, the forward pass does what DDP's
does around the module (buffers, moving inputs), and the synchronizer replaces the reducer. If the
plan is mere buckets, all of DDP's own code runs, with another reducer of torch that has these
buckets (native_buckets.py).
"""

# mypy: allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.parallel.distributed as torch_ddp
from torch import nn
from torch._C._distributed_c10d import _register_comm_hook
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel.distributed import DistributedDataParallel

from autotune.errors import InvalidInput, InvalidStrategy
from runtime_rewriter.pytorch.addresses import note_addresses
from runtime_rewriter.pytorch.attached import attached_to
from runtime_rewriter.pytorch.byte_scale import is_byte_scale, parts_of, scale_reducer
from runtime_rewriter.pytorch.gradient_hooks import OPTIMIZER_INSIDE, optimizers_inside
from runtime_rewriter.pytorch.hooks import GradientSynchronizer
from runtime_rewriter.pytorch.native_buckets import DdpBackend


class PlannedDataParallel(DistributedDataParallel):
    """A DDP that synchronizes by `synchronizer.plan`, or as DDP itself while that is None.

    A copy or an unpickled instance is a plain DDP: it has no synchronizer.
    """

    timeout_s: ClassVar[float] = 60.0
    agreement_timeout_s: ClassVar[float] = 20.0
    _synchronizer: GradientSynchronizer | None = None
    _backend: DdpBackend | None = None
    _reducer_is_stale = False
    _has_builtin_hook = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._take_plans()

    def _take_plans(self) -> None:
        """Build the synchronizer. Collective, before the first plan."""
        # Of a hook that is registered before, only the logger tells if it is a built-in one.
        self._has_builtin_hook = bool(self._get_ddp_logging_data().get("comm_hook"))
        self._backend = DdpBackend(self)
        self._synchronizer = GradientSynchronizer(
            self.module,
            self.process_group,
            timeout_s=self.timeout_s,
            agreement_timeout_s=self.agreement_timeout_s,
            find_unused_parameters=self.find_unused_parameters or self.static_graph,
            static_graph=self.static_graph,
            refusal_reason=self._refusal_reason,
            emulation_refusal=self._unsupported,
            on_byte_scale=partial(scale_reducer, self),
            backend=self._backend,
            buffers=self._sent_buffers,
        )

    def _sent_buffers(self) -> list[torch.Tensor]:
        return list(self.modules_buffers) if self.broadcast_buffers else []

    @property
    def synchronizer(self) -> GradientSynchronizer:
        if self._synchronizer is None:
            raise InvalidStrategy("a copied or unpickled DDP takes no plans; wrap the module again")
        return self._synchronizer

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        state.pop("_synchronizer", None)
        state.pop("_backend", None)
        return state

    def _refusal_reason(self) -> str | None:
        """Why plans are refused: this DDP has features that only its own reducer supports."""
        reason = self._unsupported()  # first: mixed precision registers a hook of its own
        if reason is None and self._has_script_hooks:
            return "the script registered a communication hook, which only DDP's own reducer calls"
        return reason

    def _unsupported(self) -> str | None:
        """Why neither plans nor emulated accelerators are supported.

        An emulated backward pass hands out gradients as a real one does, so hooks do not matter.
        """
        conditions = (
            (
                self.mixed_precision is not None,
                "the DDP was built with mixed_precision; use torch.autocast",
            ),
            (
                bool(self._delay_all_reduce_params),
                "the DDP was built with delay_all_reduce_named_params",
            ),
            (self._use_python_reducer, "torch._dynamo's optimize_ddp is 'python_reducer'"),
            (
                self._join_config.enable,
                "the DDP runs under join(), whose finished ranks answer DDP's own messages only",
            ),
            (hasattr(self, "buffer_hook"), "the DDP has a hook for buffers"),
            (optimizers_inside(self.module.parameters()), OPTIMIZER_INSIDE),
        )
        return next((reason for holds, reason in conditions if holds), None)

    @torch.compiler.disable(
        recursive=False
    )  # torch.compile(model) compiles what is called from here
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        synchronizer, backend = self._synchronizer, self._backend
        if synchronizer is None or backend is None:
            return super().forward(*inputs, **kwargs)
        if not torch.is_grad_enabled():
            synchronizer.before_evaluation()
            return super().forward(*inputs, **kwargs)
        joining = self._join_config.enable  # stays set: a script that joins does so every epoch
        # Finished ranks answer only DDP's own messages.
        answered = not (joining and synchronizer.plan is not None)
        synchronizer.before_forward(self.require_backward_grad_sync and answered)
        if joining:
            synchronizer.mark_unclean()
        if synchronizer.plan is None or joining:
            self._place_own_reducer(backend)
            output = super().forward(*inputs, **kwargs)
        elif synchronizer.native is not None:
            backend.place_planned()
            self._leave_reducer_idle(backend)
            output = super().forward(*inputs, **kwargs)
        else:
            output = self._planned_forward(*inputs, **kwargs)
            self._leave_reducer_idle(backend)
        synchronizer.after_forward(output, self.require_backward_grad_sync and answered)
        return output

    def _place_own_reducer(self, backend: DdpBackend) -> None:
        backend.place_own()
        if self._reducer_is_stale:
            self._rebuild_reducer()

    def _leave_reducer_idle(self, backend: DdpBackend) -> None:
        """Note that a reducer which finds unused parameters, or still learns a static graph, counts
        the hooks of this step."""
        finding = self.find_unused_parameters and not self.static_graph
        self._reducer_is_stale |= backend.own_is_learning or finding

    @torch.compiler.disable(recursive=False)
    def _planned_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run DDP's `_pre_forward`, the module and `_post_forward` without the reducer."""
        if self._check_sync_bufs_pre_fwd():
            self._sync_buffers()
        if self.device_ids:
            device = torch.device(self.device_type, self.device_ids[0])
            moved, moved_kwargs = _to_kwargs(
                inputs, kwargs, device, self.use_side_stream_for_tensor_copies
            )
            inputs, kwargs = moved[0], moved_kwargs[0]
        output = self._run_ddp_forward(*inputs, **kwargs)
        self.require_forward_param_sync = self.require_backward_grad_sync
        finding = self.find_unused_parameters and not self.static_graph
        return self._connected(output) if finding else output

    def _connected(self, output: Any) -> Any:
        """Copy the outputs behind one node of autograd, as DDP does where it finds unused
        parameters: a backward pass from one output ends the pass of all."""
        tensors, structure, remote = torch_ddp._tree_flatten_with_rref(output)
        copies = torch_ddp._DDPSink.apply(weakref.ref(self), *tensors)
        connected = [
            tensor if isinstance(tensor, torch.Tensor) and tensor.grad_fn is None else copy
            for tensor, copy in zip(tensors, copies, strict=True)
        ]
        return torch_ddp._tree_unflatten_with_rref(connected, structure, remote)

    @torch.compiler.disable(recursive=False)
    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._synchronizer is None:
            return super()._run_ddp_forward(*inputs, **kwargs)
        if torch.is_grad_enabled():
            self._synchronizer.forward_starts()
        return self._synchronizer.compute(super()._run_ddp_forward, inputs, kwargs)

    @torch.compiler.disable
    def _distributed_broadcast_coalesced(
        self, tensors: list[torch.Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        scale = 1.0 if self._synchronizer is None else self._synchronizer.byte_scale
        super()._distributed_broadcast_coalesced(
            parts_of(tensors, scale), buffer_size, authoritative_rank
        )

    # A script's hooks belong to DDP's own reducer, so with them no plan can be enacted.

    @property
    def _has_script_hooks(self) -> bool:
        hooks = (state for _, state in self._comm_hooks)
        return self._has_builtin_hook or any(not is_byte_scale(state) for state in hooks)

    def register_comm_hook(self, state: object, hook: Any) -> None:
        if not is_byte_scale(state):
            self._refuse_hooks_under_a_plan()
        with self._own_reducer():
            super().register_comm_hook(state, hook)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        self._refuse_hooks_under_a_plan()
        with self._own_reducer():
            super()._register_builtin_comm_hook(comm_hook_type)
        self._has_builtin_hook = True

    def _refuse_hooks_under_a_plan(self) -> None:
        if self._synchronizer is not None and self._synchronizer.plan is not None:
            raise InvalidStrategy(
                "a communication hook cannot be registered while gradients are sent by a plan, "
                "which would ignore it; train without the strategy, or without the hook"
            )

    def _set_static_graph(self) -> None:
        before = self.static_graph
        with self._own_reducer():
            super()._set_static_graph()
        if self._backend is not None and not before:
            self._backend.set_static_graph()

    def join_hook(self, **kwargs: Any) -> Any:
        # A finished rank answers messages of DDP's own reducer, even if it makes no step itself.
        if self._backend is not None:
            self._place_own_reducer(self._backend)
        return super().join_hook(**kwargs)

    def _own_reducer(self) -> AbstractContextManager[None]:
        return nullcontext() if self._backend is None else self._backend.own_in_place()

    def _rebuild_reducer(self) -> None:
        """Build DDP's own reducer again, as in its constructor, without counts of other steps."""
        ddp: Any = self  # torch leaves these methods without types
        parameters, sparse = ddp._build_params_for_reducer()
        ddp._ddp_init_helper(
            parameters,
            sparse,
            ddp._build_debug_param_to_name_mapping(parameters),
            self.static_graph,
        )
        if self.static_graph:
            ddp.reducer._set_static_graph()
            ddp.logger._set_static_graph()
        for hook, state in self._comm_hooks:
            _register_comm_hook(self.reducer, state, hook)
        self._reducer_is_stale = False

    @contextmanager
    @torch.compiler.disable(recursive=False)
    def _inside_ddp_forward(self) -> Iterator[None]:
        # torch's version names the class through its module, where `replaced_ddp` has put another
        # one; torch.compile looks at torch's own class to split graphs at DDP's buckets.
        before = DistributedDataParallel._active_ddp_module
        DistributedDataParallel._active_ddp_module = self
        try:
            yield
        finally:
            DistributedDataParallel._active_ddp_module = before


class ModelObserver(Protocol):
    """The session that receives a script's models."""

    def model_built(self, synchronizer: GradientSynchronizer) -> None: ...


@contextmanager
def replaced_ddp(
    session: ModelObserver, *, timeout_s: float = 60.0, agreement_timeout_s: float = 20.0
) -> Iterator[None]:
    """Let `DistributedDataParallel(...)` build a `PlannedDataParallel` inside and report it to
    `session`.

    Always restored.
    """

    class Replacement(PlannedDataParallel):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            session.model_built(self.synchronizer)

    note_addresses()
    Replacement.timeout_s, Replacement.agreement_timeout_s = timeout_s, agreement_timeout_s
    # A saved model must load where nothing is replaced, so the class goes by the name of torch's
    # own.
    for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(Replacement, attribute, getattr(DistributedDataParallel, attribute))
    places: tuple[Any, ...] = (torch.nn.parallel, torch_ddp)
    originals = [place.DistributedDataParallel for place in places]
    try:
        for place in places:
            place.DistributedDataParallel = Replacement
        yield
    finally:
        for place, original in zip(places, originals, strict=True):
            place.DistributedDataParallel = original


@contextmanager
def adopted(
    ddp: DistributedDataParallel, *, timeout_s: float, agreement_timeout_s: float
) -> Iterator[GradientSynchronizer]:
    """Let a DDP of torch's own class take plans and listeners inside; restore it afterwards.

    Collective at the start, local at the end; between two steps. A DDP that takes plans already is
    left alone. Raises `InvalidInput` for another subclass of DDP, whose methods we do not know.
    """
    if isinstance(ddp, PlannedDataParallel):
        yield ddp.synchronizer
        return
    if type(ddp) is not DistributedDataParallel:
        raise InvalidInput(
            "the model must be a torch.nn.parallel.DistributedDataParallel itself, but is a "
            f"{type(ddp).__name__}"
        )
    adopted_ddp: Any = ddp
    adopted_ddp.__class__ = PlannedDataParallel
    adopted_ddp.timeout_s, adopted_ddp.agreement_timeout_s = timeout_s, agreement_timeout_s
    try:
        adopted_ddp._take_plans()
        yield adopted_ddp.synchronizer
    finally:
        if adopted_ddp._synchronizer is not None:
            adopted_ddp._synchronizer.close()
        if adopted_ddp._reducer_is_stale:
            adopted_ddp._rebuild_reducer()
        ours = (
            "_backend",
            "_synchronizer",
            "_reducer_is_stale",
            "_has_builtin_hook",
            "timeout_s",
            "agreement_timeout_s",
        )
        for name in ours:
            adopted_ddp.__dict__.pop(name, None)
        adopted_ddp.__class__ = DistributedDataParallel


def synchronizer_of(module: nn.Module) -> GradientSynchronizer | None:
    """The synchronizer of a DDP that takes plans or of a plain module with one attached, or
    None."""
    if isinstance(module, PlannedDataParallel):
        return module.synchronizer
    return attached_to(module)
