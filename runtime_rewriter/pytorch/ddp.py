"""torch's DistributedDataParallel with plans.

`PlannedDataParallel` is a DDP: without a plan every call goes to torch's own code with the user's
own arguments, so that "the current setup" is measured as it is.  With a plan, the forward pass does
what DDP's does around the module (buffers, moving inputs) and the synchronizer takes the reducer's
place; where the plan is nothing but buckets, all of DDP's own code runs and only its reducer is
another one of torch's, with these buckets (native_buckets.py).
"""

# mypy: allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
import torch.nn.parallel.distributed as torch_ddp
from torch import nn
from torch._C._distributed_c10d import _register_comm_hook
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel.distributed import DistributedDataParallel

from autotune.errors import InvalidInput, InvalidStrategy
from runtime_rewriter.pytorch.attached import attached_to
from runtime_rewriter.pytorch.byte_scale import parts_of, scale_reducer
from runtime_rewriter.pytorch.cross_step import flush_all_synchronizers
from runtime_rewriter.pytorch.hooks import GradientSynchronizer
from runtime_rewriter.pytorch.native_buckets import DdpBackend


class PlannedDataParallel(DistributedDataParallel):
    """A DDP whose gradients are synchronized by `synchronizer.plan`, or by DDP itself while that is
    None.

    A copy or an unpickled instance is a plain DDP: it has no synchronizer.
    """

    timeout_s: ClassVar[float] = 60.0
    agreement_timeout_s: ClassVar[float] = 20.0
    _synchronizer: GradientSynchronizer | None = None
    _backend: DdpBackend | None = None
    _reducer_is_stale = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._take_plans()

    def _take_plans(self) -> None:
        """Collective, before the first plan."""
        self._backend = DdpBackend(self)
        self._synchronizer = GradientSynchronizer(
            self.module,
            self.process_group,
            timeout_s=self.timeout_s,
            agreement_timeout_s=self.agreement_timeout_s,
            find_unused_parameters=self.find_unused_parameters or self.static_graph,
            static_graph=self.static_graph,
            refusal_reason=self._refusal_reason,
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
        """Uses of DDP whose meaning lies in its reducer."""
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
            (
                any(hasattr(p, "_in_backward_optimizers") for p in self.module.parameters()),
                "an optimizer runs inside the backward pass, before the gradients are synchronized",
            ),
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
        joining = (
            self._join_config.enable
        )  # torch never takes it back: a script that joins does so every epoch
        answered = not (
            joining and synchronizer.plan is not None
        )  # finished ranks answer DDP's own messages only
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
        synchronizer.after_forward(output)
        return output

    def _place_own_reducer(self, backend: DdpBackend) -> None:
        backend.place_own()
        if self._reducer_is_stale:
            self._rebuild_reducer()

    def _leave_reducer_idle(self, backend: DdpBackend) -> None:
        """One that looks for unused parameters, or still learns a static graph, will count the
        hooks of this step."""
        self._reducer_is_stale |= backend.own_is_learning or (
            self.find_unused_parameters and not self.static_graph
        )

    @torch.compiler.disable(recursive=False)
    def _planned_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """DDP's `_pre_forward`, the module and `_post_forward` without the reducer, which therefore
        stays idle."""
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
        return output

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

    # What a script registers belongs to DDP's own reducer; under a plan, the plan synchronizes.

    def register_comm_hook(self, state: object, hook: Any) -> None:
        with self._own_reducer():
            super().register_comm_hook(state, hook)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        with self._own_reducer():
            super()._register_builtin_comm_hook(comm_hook_type)

    def _set_static_graph(self) -> None:
        before = self.static_graph
        with self._own_reducer():
            super()._set_static_graph()
        if self._backend is not None and not before:
            self._backend.set_static_graph()

    def join_hook(self, **kwargs: Any) -> Any:
        if (
            self._backend is not None
        ):  # a finished rank answers what DDP's own reducer sends elsewhere, and may make no step here
            self._place_own_reducer(self._backend)
        return super().join_hook(**kwargs)

    def _own_reducer(self) -> AbstractContextManager[None]:
        return nullcontext() if self._backend is None else self._backend.own_in_place()

    def _rebuild_reducer(self) -> None:
        """DDP's own, as it was when the DDP was built: what it counted of others' steps is
        forgotten."""
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
    """The session that a script's models report to."""

    def model_built(self, synchronizer: GradientSynchronizer) -> None: ...


@contextmanager
def replaced_ddp(
    session: ModelObserver, *, timeout_s: float = 60.0, agreement_timeout_s: float = 20.0
) -> Iterator[None]:
    """Inside, `DistributedDataParallel(...)` builds a `PlannedDataParallel` and tells `session`;
    always restored."""

    class Replacement(PlannedDataParallel):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            session.model_built(self.synchronizer)

    Replacement.timeout_s, Replacement.agreement_timeout_s = timeout_s, agreement_timeout_s
    # A saved model must load where nothing is replaced, so the class goes by the name of torch's
    # own.
    for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(Replacement, attribute, getattr(DistributedDataParallel, attribute))
    destroy = dist.destroy_process_group

    @wraps(destroy)
    def flush_and_destroy(*args: Any, **kwargs: Any) -> None:
        flush_all_synchronizers()  # what crosses the last step needs its groups
        destroy(*args, **kwargs)

    places: tuple[tuple[Any, str, Any], ...] = (
        (torch.nn.parallel, "DistributedDataParallel", Replacement),
        (torch_ddp, "DistributedDataParallel", Replacement),
        (dist, "destroy_process_group", flush_and_destroy),
    )
    originals = [getattr(place, name) for place, name, _ in places]
    try:
        for place, name, replacement in places:
            setattr(place, name, replacement)
        yield
    finally:
        for (place, name, _), original in zip(places, originals, strict=True):
            setattr(place, name, original)


@contextmanager
def adopted(
    ddp: DistributedDataParallel, *, timeout_s: float, agreement_timeout_s: float
) -> Iterator[GradientSynchronizer]:
    """Inside, a DDP that torch's own class built takes plans, and its steps can be listened to; it
    is as before afterwards.

    Collective at its begin, local at its end; between two steps. One that takes plans already goes
    on doing so. Raises `InvalidInput` for another class of DDP, whose own methods we do not know.
    """
    if isinstance(ddp, PlannedDataParallel):
        yield ddp.synchronizer
        return
    if type(ddp) is not DistributedDataParallel:
        raise InvalidInput(
            f"the model must be a torch.nn.parallel.DistributedDataParallel itself, but is a {type(ddp).__name__}"
        )
    taken: Any = ddp
    taken.__class__ = PlannedDataParallel
    taken.timeout_s, taken.agreement_timeout_s = timeout_s, agreement_timeout_s
    try:
        taken._take_plans()
        yield taken.synchronizer
    finally:
        if taken._synchronizer is not None:
            taken._synchronizer.close()
        if taken._reducer_is_stale:
            taken._rebuild_reducer()
        for name in (
            "_backend",
            "_synchronizer",
            "_reducer_is_stale",
            "timeout_s",
            "agreement_timeout_s",
        ):
            taken.__dict__.pop(name, None)
        taken.__class__ = DistributedDataParallel


def synchronizer_of(module: nn.Module) -> GradientSynchronizer | None:
    """That of a DDP that takes plans, or of a plain module to which one is attached; None where
    there is none."""
    if isinstance(module, PlannedDataParallel):
        return module.synchronizer
    return attached_to(module)
