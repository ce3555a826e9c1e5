"""Plans that torch's own DDP reducer executes: its C++ code, no Python per gradient.

A reducer accepts any buckets and starts them in their order. After its first step it would rebuild
them by size and by the order in which gradients became ready. We make it rebuild them at once with
the plan's order and sizes, so it keeps the plan's buckets (`Reducer::rebuild_buckets` in
torch/csrc/distributed/c10d/reducer.cpp). A reducer that finds unused parameters never rebuilds
them.
"""

# mypy: allow-untyped-calls, no-warn-return-any

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import (
    Logger,
    Reducer,
    _compute_bucket_assignment_by_size,
    _register_comm_hook,
)
from torch.nn.parallel import DistributedDataParallel

from autotune.strategy_space.backend import buckets_of
from autotune.strategy_space.plan import Plan
from runtime_rewriter.pytorch.byte_scale import ScaledReduction, scaled_all_reduce

Buckets = tuple[tuple[str, ...], ...]
"""The variables of each bucket, in issue order."""


@dataclass(frozen=True)
class ReducerOptions:
    """Options of a DDP that its reducer needs; the names are DDP's."""

    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = False
    skip_all_reduce_unused_params: bool = False
    batched_grad_copy: bool = False


class BucketReducer:
    """A reducer of torch with the given buckets. Building one is collective over `group`.

    With a `byte_scale` of k only the first 1/k of every bucket travels.
    """

    def __init__(
        self,
        buckets: Buckets,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        byte_scale: float = 1.0,
        options: ReducerOptions | None = None,
    ) -> None:
        options = options or ReducerOptions()
        self.count = len(buckets)
        self._names = [name for bucket in buckets for name in bucket]
        self._finds_unused = options.find_unused_parameters
        ordered: list[Tensor] = [parameters[name] for name in self._names]
        numbers = iter(range(len(ordered)))
        indices = [[next(numbers) for _ in bucket] for bucket in buckets]
        sizes_bytes = [sum(ordered[i].nbytes for i in bucket) for bucket in indices]
        dense = [False] * len(ordered)
        everything = list(range(len(ordered)))
        assigned, _ = _compute_bucket_assignment_by_size(ordered, sizes_bytes, dense, everything)
        assert assigned == indices, "sizes of buckets give the buckets"
        reducer: Any = Reducer(
            ordered,
            indices,
            sizes_bytes,
            group,
            dense,
            max(sizes_bytes),
            options.find_unused_parameters,
            options.gradient_as_bucket_view,
            dict(enumerate(self._names)),
            sizes_bytes[0],
            options.skip_all_reduce_unused_params,
            False,  # the Python reducer
            sizes_bytes,
            options.batched_grad_copy,
        )
        self.reducer = reducer
        if options.static_graph:
            self.set_static_graph()
        reducer._push_all_rebuilt_params()
        reducer._rebuild_buckets()
        if byte_scale != 1:
            _register_comm_hook(reducer, ScaledReduction(group, byte_scale), scaled_all_reduce)

    def set_static_graph(self) -> None:
        """Let its first backward pass learn how often each variable is used; before its first
        step."""
        self.reducer._set_static_graph()
        self._finds_unused = True

    @property
    def finished(self) -> bool:
        """Whether every bucket of the last backward pass has arrived."""
        try:
            self.reducer._check_reducer_finalized()
        except RuntimeError:
            return False
        return True

    def unused(self) -> frozenset[str]:
        """The variables that no rank used in the last backward pass; they keep their `.grad`."""
        if not self._finds_unused:
            return frozenset()
        used = self.reducer._get_local_used_map().tolist()
        return frozenset(name for name, ranks in zip(self._names, used, strict=True) if ranks == 0)


class Backend(Protocol):
    """Lets a module's forward pass drive a reducer of torch, which then executes plans."""

    def buckets_of(self, plan: Plan) -> Buckets | None:
        """The plan's buckets; None if the plan or the module's gradients need more than buckets."""

    def install(
        self,
        buckets: Buckets,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        byte_scale: float,
    ) -> BucketReducer:
        """Send these from the next forward pass on. Collective.

        Raises `RuntimeError` if a rank is gone.
        """

    def release(self) -> None:
        """Undo `install`. Local."""

    def own_buckets(self) -> Buckets | None:
        """The buckets that the module's own synchronization sends now; None if it has no
        buckets."""

    def rebuilt_buckets(self, ready: Sequence[str]) -> Buckets | None:
        """The same after the next rebuild, if gradients become ready in this order."""

    @property
    def bucket_view(self) -> bool | None:
        """Whether gradients are views of the buckets of the module's own reducer; None without
        one."""


def _has_sparse_gradients(module: nn.Module) -> bool:
    """Whether gradients are sparse by DDP's rule. Its reducer would send them in its own way."""
    return any(
        isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse
        for part in module.modules()
    )


class ModuleBackend:
    """A reducer for a plain module, whose forward pass calls `before_forward` and
    `after_forward`. Unless it is `enabled`, it executes no plan."""

    def __init__(self, module: nn.Module, enabled: bool) -> None:
        self._module = module
        self._enabled = enabled
        self._planned_reducer: BucketReducer | None = None

    def buckets_of(self, plan: Plan) -> Buckets | None:
        if not self._enabled or _has_sparse_gradients(self._module):
            return None
        return buckets_of(plan)

    def install(
        self,
        buckets: Buckets,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        byte_scale: float,
    ) -> BucketReducer:
        self._planned_reducer = BucketReducer(buckets, parameters, group, byte_scale)
        return self._planned_reducer

    def release(self) -> None:
        self._planned_reducer = None

    def own_buckets(self) -> Buckets | None:
        return None

    def rebuilt_buckets(self, ready: Sequence[str]) -> Buckets | None:
        return None

    @property
    def bucket_view(self) -> bool | None:
        return None

    def before_forward(self, synchronize: bool) -> None:
        """Call in forward passes with gradients.

        Raises `RuntimeError` if the last backward pass left a variable out.
        """
        if self._planned_reducer is None:
            return
        if synchronize:
            self._planned_reducer.reducer.prepare_for_forward()
        self._planned_reducer.reducer._rebuild_buckets()  # there is nothing to rebuild: it checks

    def after_forward(self, synchronize: bool) -> None:
        if self._planned_reducer is not None and synchronize:
            self._planned_reducer.reducer.prepare_for_backward([])


@dataclass
class _Place:
    """The parts of a DDP that belong to one reducer.

    `queued`: DDP's `_static_graph_delay_allreduce_enqueued`, whether the first pass of a static
    graph has been queued.
    """

    reducer: Any
    logger: Any
    queued: bool


class DdpBackend:
    """Replaces the reducer of a DDP, whose code drives ours; DDP's own keeps what it has
    learned."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp: Any = ddp
        # The reducer that is not in the DDP; None: there is only DDP's own.
        self._idle: _Place | None = None
        self._planned_reducer: BucketReducer | None = None
        self._planned = False  # the planned reducer is in the DDP

    def buckets_of(self, plan: Plan) -> Buckets | None:
        return None if _has_sparse_gradients(self._ddp.module) else buckets_of(plan)

    def install(
        self,
        buckets: Buckets,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        byte_scale: float,
    ) -> BucketReducer:
        ddp = self._ddp
        options = ReducerOptions(
            **{field.name: getattr(ddp, field.name) for field in fields(ReducerOptions)}
        )
        planned = BucketReducer(buckets, parameters, group, byte_scale, options)
        self.release()
        self._planned_reducer = planned
        self._idle = _Place(planned.reducer, self._logger(planned.reducer), queued=False)
        return planned

    def release(self) -> None:
        self.place_own()
        self._idle = self._planned_reducer = None

    def own_buckets(self) -> Buckets | None:
        """After the first steps, those rebuilt from the order in which gradients became ready."""
        if _has_sparse_gradients(self._ddp.module) or self._ddp._comm_hooks:
            return None
        reducer = (
            self._idle.reducer if self._planned and self._idle is not None else self._ddp.reducer
        )
        names = {id(parameter): name for name, parameter in self._ddp.module.named_parameters()}
        buckets = []
        for bucket in reducer._get_zeros_like_grad_buckets():
            known = tuple(names[id(p)] for p in bucket.parameters() if id(p) in names)
            if len(known) != len(bucket.parameters()):
                return None
            buckets.append(known)
        return tuple(buckets)

    def rebuilt_buckets(self, ready: Sequence[str]) -> Buckets | None:
        """Nothing changes if the reducer has rebuilt them, or finds unused parameters."""
        ddp, known = self._ddp, self.own_buckets()
        keeps = ddp.find_unused_parameters and not ddp.static_graph
        if known is None or keeps or ddp._has_rebuilt_buckets:
            return known
        named = dict(ddp.module.named_parameters())
        sent = {name for bucket in known for name in bucket}
        order = [name for name in ready if name in sent]
        if len(order) != len(sent):
            return None
        first = dist._DEFAULT_FIRST_BUCKET_BYTES
        if not getattr(ddp, "bucket_bytes_cap_default", True):
            first = ddp.bucket_bytes_cap
        limits = list(getattr(ddp, "bucket_bytes_cap_list", ())) or [first, ddp.bucket_bytes_cap]
        tensors, everything = [named[name] for name in order], list(range(len(order)))
        assigned, _ = _compute_bucket_assignment_by_size(
            tensors, limits, [False] * len(order), everything
        )
        return tuple(tuple(order[index] for index in bucket) for bucket in assigned)

    @property
    def bucket_view(self) -> bool | None:
        return bool(self._ddp.gradient_as_bucket_view)

    def place_planned(self) -> None:
        if not self._planned:
            self._swap()

    def place_own(self) -> None:
        if self._planned:
            self._swap()

    @property
    def own_is_learning(self) -> bool:
        """Whether DDP's own reducer still has to see the first pass of its static graph."""
        if not self._ddp.static_graph:
            return False
        if self._planned and self._idle is not None:
            return not self._idle.queued
        return not self._ddp._static_graph_delay_allreduce_enqueued

    def set_static_graph(self) -> None:
        """Make the planned reducer's graph static, too."""
        self.place_own()
        if self._planned_reducer is not None and self._idle is not None:
            self._planned_reducer.set_static_graph()
            self._idle.logger._set_static_graph()

    @contextmanager
    def own_in_place(self) -> Iterator[None]:
        """Put DDP's own reducer in place inside, for hooks that a script registers."""
        planned = self._planned
        self.place_own()
        try:
            yield
        finally:
            if planned:
                self.place_planned()

    def _swap(self) -> None:
        ddp, idle = self._ddp, self._idle
        assert idle is not None
        self._idle = _Place(
            ddp.reducer, ddp.logger, ddp.static_graph and ddp._static_graph_delay_allreduce_enqueued
        )
        ddp.reducer, ddp.logger = idle.reducer, idle.logger
        if ddp.static_graph:
            ddp._static_graph_delay_allreduce_enqueued = idle.queued
        self._planned = not self._planned

    def _logger(self, reducer: Any) -> Any:
        """Build a logger as `DistributedDataParallel._ddp_init_helper` does."""
        ddp = self._ddp
        logger = Logger(reducer)
        reducer.set_logger(logger)
        logger.set_construction_data_and_log(
            type(ddp.module).__name__,
            ddp.device_ids or [],
            -1 if ddp.output_device is None else ddp.output_device,
            ddp.forward_sync_buffers,
            any(isinstance(part, nn.SyncBatchNorm) for part in ddp.module.modules()),
            ddp.static_graph,
        )
        if ddp.static_graph:
            logger._set_static_graph()
        return logger
