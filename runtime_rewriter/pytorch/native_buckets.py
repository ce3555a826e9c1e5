"""Plans that torch's own DDP reducer carries out: its C++ code, no Python per gradient.

A reducer takes any buckets in any order and starts them in that order. After its first step it
would make them anew, by sizes and the order in which gradients came; so here it does that at once,
told the plan's order and the messages' sizes, and has settled in the plan's buckets
(`Reducer::rebuild_buckets` in torch/csrc/distributed/c10d/reducer.cpp; a reducer that looks for
unused parameters never makes them anew).
"""

# mypy: allow-untyped-calls, no-warn-return-any

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
"""Names of the variables of each bucket, in the order in which buckets are sent."""


@dataclass(frozen=True)
class ReducerOptions:
    """Options of a DDP that its reducer must know; the names are DDP's."""

    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = False
    skip_all_reduce_unused_params: bool = False
    batched_grad_copy: bool = False


class BucketReducer:
    """A reducer of torch whose buckets are `buckets`. Building one is collective over `group`,
    which carries its messages.

    With a `byte_scale` of k the first part of every bucket travels, 1/k of it.
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
        sizes_bytes = [
            sum(ordered[i].numel() * ordered[i].element_size() for i in bucket)
            for bucket in indices
        ]
        dense = [False] * len(ordered)
        settled, _ = _compute_bucket_assignment_by_size(
            ordered, sizes_bytes, dense, list(range(len(ordered)))
        )
        assert settled == indices, "sizes of buckets give the buckets"
        made: Any = Reducer(
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
        self.reducer = made
        if options.static_graph:
            self.set_static_graph()
        made._push_all_rebuilt_params()
        made._rebuild_buckets()
        if byte_scale != 1:
            _register_comm_hook(made, ScaledReduction(group, byte_scale), scaled_all_reduce)

    def set_static_graph(self) -> None:
        """Before its first step: it learns which variables are used, and how often, in its first
        backward pass."""
        self.reducer._set_static_graph()
        self._finds_unused = True

    @property
    def finished(self) -> bool:
        """Every bucket of the last backward pass has arrived."""
        try:
            self.reducer._check_reducer_finalized()
        except RuntimeError:
            return False
        return True

    def unused(self) -> frozenset[str]:
        """After a backward pass: the variables that no rank used, whose `.grad` was therefore
        kept."""
        if not self._finds_unused:
            return frozenset()
        used = self.reducer._get_local_used_map().tolist()
        return frozenset(name for name, ranks in zip(self._names, used, strict=True) if ranks == 0)


class Backend(Protocol):
    """Where a module's forward pass can drive a reducer of torch."""

    def buckets_of(self, plan: Plan) -> Buckets | None:
        """What the reducer would send; None where the plan is more than buckets, or the module's
        gradients need more."""

    def install(
        self,
        buckets: Buckets,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        byte_scale: float,
    ) -> BucketReducer:
        """Collective: from the next forward pass on send these. Raises `RuntimeError` where a rank
        is gone."""

    def release(self) -> None:
        """Local: as before `install`."""

    def own_buckets(self) -> Buckets | None:
        """What the module's own synchronization sends now; None where it has none, or one that
        sends other than whole buckets."""

    @property
    def bucket_view(self) -> bool | None:
        """Whether gradients lie in the buckets of the module's own reducer; None where it has
        none."""


def _has_sparse_gradients(module: nn.Module) -> bool:
    """As DDP tells. It would send them in its own way, which no plan means."""
    return any(
        isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse
        for part in module.modules()
    )


class ModuleBackend:
    """A reducer for a plain module, whose forward pass calls `before_forward` and
    `after_forward`."""

    def __init__(self, module: nn.Module, carries: bool) -> None:
        self._module, self._carries = module, carries
        self._made: BucketReducer | None = None

    def buckets_of(self, plan: Plan) -> Buckets | None:
        return (
            buckets_of(plan) if self._carries and not _has_sparse_gradients(self._module) else None
        )

    def install(
        self,
        buckets: Buckets,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        byte_scale: float,
    ) -> BucketReducer:
        self._made = BucketReducer(buckets, parameters, group, byte_scale)
        return self._made

    def release(self) -> None:
        self._made = None

    def own_buckets(self) -> Buckets | None:
        return None

    @property
    def bucket_view(self) -> bool | None:
        return None

    def before_forward(self, synchronize: bool) -> None:
        """In forward passes with gradients. Raises `RuntimeError` where the last backward pass left
        a variable out."""
        if self._made is None:
            return
        if synchronize:
            self._made.reducer.prepare_for_forward()
        self._made.reducer._rebuild_buckets()  # there is nothing to rebuild: it checks

    def after_forward(self, synchronize: bool) -> None:
        if self._made is not None and synchronize:
            self._made.reducer.prepare_for_backward([])


@dataclass
class _Place:
    """What of a DDP belongs to one reducer. `queued`: the first pass of a static graph has been
    queued for it (DDP's `_static_graph_delay_allreduce_enqueued`)."""

    reducer: Any
    logger: Any
    queued: bool


class DdpBackend:
    """A reducer in the place of a DDP's own, whose code drives it; the own one waits with what it
    has learned."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp: Any = ddp
        self._idle: _Place | None = (
            None  # the one that is not in the DDP; None: there is only DDP's own
        )
        self._made: BucketReducer | None = None
        self._planned = False  # the planned one is in the DDP

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
        made = BucketReducer(buckets, parameters, group, byte_scale, options)
        self.release()
        self._made = made
        self._idle = _Place(made.reducer, self._logger(made.reducer), queued=False)
        return made

    def release(self) -> None:
        self.place_own()
        self._idle = self._made = None

    def own_buckets(self) -> Buckets | None:
        """After the first steps they are those that the reducer made anew from the order in which
        gradients came."""
        if _has_sparse_gradients(self._ddp.module) or self._ddp._comm_hooks:
            return None
        own = self._idle.reducer if self._planned and self._idle is not None else self._ddp.reducer
        names = {id(parameter): name for name, parameter in self._ddp.module.named_parameters()}
        found = [
            [names.get(id(p)) for p in bucket.parameters()]
            for bucket in own._get_zeros_like_grad_buckets()
        ]
        known = tuple(tuple(name for name in bucket if name is not None) for bucket in found)
        return (
            known
            if [len(bucket) for bucket in known] == [len(bucket) for bucket in found]
            else None
        )

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
        """DDP's own reducer has yet to see the first pass of its static graph."""
        if not self._ddp.static_graph:
            return False
        return not (
            self._idle.queued
            if self._planned and self._idle is not None
            else self._ddp._static_graph_delay_allreduce_enqueued
        )

    def set_static_graph(self) -> None:
        """The DDP's graph has become static: the planned reducer learns it, too."""
        self.place_own()
        if self._made is not None and self._idle is not None:
            self._made.set_static_graph()
            self._idle.logger._set_static_graph()

    @contextmanager
    def own_in_place(self) -> Iterator[None]:
        """Inside, what is registered with the DDP's reducer is registered with its own."""
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
        """As `DistributedDataParallel._ddp_init_helper` makes one."""
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
