"""Predicts steps of a Horovod script under any fusion threshold, cycle time and groups.

The network may be another one than the costs were fitted on: then a collective's slope changes by
what its ring moves through the slowest port. A step is one period, from the start of a backward
pass to the next one. Horovod's optimizer waits for all tensors before it updates.

| symbol | meaning |
|---|---|
| V | variables, in backward order |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.arrays import FloatArray
from autotune.cluster import Cluster, CollectiveFit
from autotune.dfg.build import DfgBuilder
from autotune.dfg.graph import NONE, Dfg, Kind
from autotune.dfg.replay import replay
from autotune.errors import InvalidInput
from autotune.limits import check_seconds
from autotune.lowering.negotiation import (
    EnqueuedTensor,
    HorovodSettings,
    NegotiationCycle,
    SentBatch,
    negotiated,
)
from autotune.lowering.pass_times import PassTimes
from autotune.lowering.traffic import Collective, Ports
from autotune.workload import DTYPE_BYTES, Workload

PHASES = 5
"""Predicted steps begin at this many places between two idle cycles; `step_s` is their mean."""
DERIVED = "(derived)"


@dataclass(frozen=True)
class HorovodCosts:
    """Costs of Horovod on one cluster, fitted to a recording (`profiling.fits.horovod_fit`).

    - `all_reduce`: a batch of one tensor, with its dispatch. `link_s_per_byte`: what the ring of
      the fitted cluster takes per byte of the tensor on its slowest port.
    - `negotiate_s`: agreement of all ranks in a cycle.
    - `copy_s`, `copy_s_per_byte`: into and out of the fusion buffer, per tensor and per byte of a
      batch of several tensors.
    - `synchronize_s`: the host's part of a handle's completion.
    """

    all_reduce: CollectiveFit
    link_s_per_byte: float
    negotiate_s: float
    copy_s: float
    copy_s_per_byte: float
    synchronize_s: float

    def __post_init__(self) -> None:
        for name in ("negotiate_s", "copy_s", "synchronize_s"):
            check_seconds(getattr(self, name), f"{name} of Horovod's costs")


@dataclass(frozen=True, eq=False)
class HostTimes:
    """Times of the script's own work, which the settings do not change, in seconds.

    - `enqueued_s` (V,): when every rank has enqueued a gradient, from the start of the step.
    - `backward_s`: end of the backward pass, from the start of the step.
    - `rest_s`: from the last completion to the start of the next step.
    """

    enqueued_s: FloatArray
    backward_s: float
    rest_s: float

    @staticmethod
    def assumed(workload: Workload) -> HostTimes:
        """Ranks that compute in step, and hooks that take no time. A step is a backward pass on."""
        ready_s = PassTimes.of(workload).ready_s
        return HostTimes(ready_s, workload.backward_s, workload.update_s + workload.forward_s)


def ring_s_per_byte(cluster: Cluster) -> float:
    """Seconds per byte of a tensor on the slowest port, in a ring of all ranks."""
    ranks = tuple(range(cluster.world_size))
    return Ports(cluster).traffic(Collective.ALL_REDUCE, ranks).alone_s_per_byte


class HorovodLowering:
    """Predicts many settings of one workload on one cluster.

    `times`: those that a recording shows (`profiling.graph.horovod_costs`), by default assumed from
    the workload. Raises `InvalidInput` if the costs were fitted for another number of ranks.
    """

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        costs: HorovodCosts,
        times: HostTimes | None = None,
    ) -> None:
        if costs.all_reduce.group_size != cluster.world_size:
            raise InvalidInput(
                "Horovod's costs must be of as many ranks as the cluster has, but they are of "
                f"{costs.all_reduce.group_size} and cluster {cluster.name!r} has "
                f"{cluster.world_size}; record a run of {cluster.world_size} ranks"
            )
        self.workload = workload
        self.cluster = cluster
        self.costs = costs
        self.times = times or HostTimes.assumed(workload)
        self._slower_s_per_byte = ring_s_per_byte(cluster) - costs.link_s_per_byte

    def step_s(self, settings: HorovodSettings) -> float:
        """Predicted seconds per step."""
        phases = (np.arange(PHASES) + 0.5) / PHASES
        return float(np.mean([self.timeline_s(settings, phase) for phase in phases.tolist()]))

    def timeline_s(self, settings: HorovodSettings, phase: float) -> float:
        """Seconds of a step whose first tensor is enqueued at this `phase` of the idle cycles."""
        return replay(self.graph(settings, phase)).makespan_s

    def all_reduce_s(self, size_bytes: float) -> float:
        """One transfer on this cluster."""
        fitted_s = self.costs.all_reduce.seconds(size_bytes)
        return max(fitted_s + self._slower_s_per_byte * size_bytes, 0.0)

    def copies_s(self, tensors: int, size_bytes: float) -> float:
        """Into and out of the fusion buffer; a single tensor is sent where it is."""
        if tensors < 2:
            return 0.0
        return self.costs.copy_s * tensors + self.costs.copy_s_per_byte * size_bytes

    def cycles(self, settings: HorovodSettings, phase: float = 0.5) -> list[NegotiationCycle]:
        """The cycles of a step, in seconds from the start of the backward pass."""
        return negotiated(
            self.enqueued(settings),
            settings,
            negotiate_s=self.costs.negotiate_s,
            batch_s=self._batch_s,
            phase=phase,
        )

    def enqueued(self, settings: HorovodSettings) -> list[EnqueuedTensor]:
        """The tensors in the order in which the host enqueues them."""
        enqueued_s = self.times.enqueued_s.tolist()
        variables = self.workload.variables
        group_of = {name: number for number, group in enumerate(settings.groups) for name in group}
        last_s: dict[int, float] = {}
        for variable, at_s in zip(variables, enqueued_s, strict=True):
            if (group := group_of.get(variable.name)) is not None:
                last_s[group] = max(last_s.get(group, 0.0), at_s)
        tensors = []
        for variable, at_s in zip(variables, enqueued_s, strict=True):
            group = group_of.get(variable.name)
            tensors.append(
                EnqueuedTensor(
                    variable.name,
                    float(variable.elements * DTYPE_BYTES[variable.dtype]),
                    variable.dtype,
                    at_s if group is None else last_s[group],
                    group,
                )
            )
        return sorted(tensors, key=lambda tensor: tensor.at_s)

    def _batch_s(self, tensors: int, size_bytes: float) -> float:
        return self.copies_s(tensors, size_bytes) + self.all_reduce_s(size_bytes)

    def graph(self, settings: HorovodSettings, phase: float = 0.5) -> Dfg:
        """One period of one of the equal workers.

        Its devices: the accelerator, the host, the negotiation cycle, and the channel, which
        executes the batches. The waits for the next cycle are delays.
        """
        return _PeriodGraph(self, settings, phase).build()


class _PeriodGraph:
    def __init__(self, lowering: HorovodLowering, settings: HorovodSettings, phase: float) -> None:
        self.lowering = lowering
        self.to = DfgBuilder()
        self.device = self.to.queue("r0 device")
        self.host = self.to.queue("r0 host")
        self.negotiation = self.to.queue("r0 negotiation cycle")
        self.channel = self.to.queue("r0 channel")
        self.tensors = lowering.enqueued(settings)
        self.cycles = lowering.cycles(settings, phase)
        self.layer = {name: number for number, name in enumerate(lowering.workload.index)}

    def build(self) -> Dfg:
        times, costs = self.lowering.times, self.lowering.costs
        enqueues = [self._enqueue(tensor) for tensor in self.tensors]
        backward = self._op("backward", self.device, times.backward_s, Kind.BACKWARD, ())
        end, free_s = NONE, 0.0
        for cycle in self.cycles:
            ready_s = max(self.tensors[tensor].at_s for tensor in cycle.tensors)
            wait_s = max(cycle.start_s - max(ready_s, free_s), 0.0)
            behind = (*(enqueues[tensor] for tensor in cycle.tensors), end)
            waited = self._op("wait for the cycle", NONE, wait_s, Kind.VIRTUAL, behind)
            agreed_s = cycle.answered_s - cycle.start_s
            name = f"negotiate {len(cycle.tensors)} tensors"
            end = self._op(name, self.negotiation, agreed_s, Kind.COLLECTIVE, (waited,))
            for batch in cycle.batches:
                end = self._batch(batch, end)
                free_s = batch.end_s
        last = self.cycles[-1].batches[-1].tensors if self.cycles else ()
        synchronize_s = costs.synchronize_s * len(last)
        synchronized = self._op(
            "synchronize", self.host, synchronize_s, Kind.UNPACK, (end, backward)
        )
        self._op("update and forward", self.device, times.rest_s, Kind.FORWARD, (synchronized,))
        return self.to.build(tuple(self.layer))

    def _enqueue(self, tensor: EnqueuedTensor) -> int:
        """The host's work until then is within the delay: other gradients' hooks come before."""
        return self._op(
            f"enqueue {tensor.name}",
            NONE,
            tensor.at_s,
            Kind.VIRTUAL,
            (),
            layer=self.layer[tensor.name],
        )

    def _batch(self, batch: SentBatch, after: int) -> int:
        lowering, count = self.lowering, len(batch.tensors)
        first = self.tensors[batch.tensors[0]].name
        label = first if count == 1 else f"{first} and {count - 1} more"
        layer = self.layer[first]
        copies_s = lowering.copies_s(count, batch.size_bytes)
        end = self._op(
            f"copy in {label}", self.channel, copies_s / 2, Kind.PACK, (after,), layer=layer
        )
        # Horovod executes the batches of a single rank, too.
        hops = max(2 * (lowering.cluster.world_size - 1), 1)
        transfer_s = lowering.all_reduce_s(batch.size_bytes)
        for hop in range(hops):
            name = f"all-reduce {label} hop {hop} {DERIVED}"
            sent_bytes = batch.size_bytes / lowering.cluster.world_size
            end = self._op(
                name,
                self.channel,
                transfer_s / hops,
                Kind.COLLECTIVE,
                (end,),
                size_bytes=sent_bytes,
                layer=layer,
            )
        return self._op(
            f"copy out {label}", self.channel, copies_s / 2, Kind.UNPACK, (end,), layer=layer
        )

    def _op(
        self,
        name: str,
        queue: int,
        duration_s: float,
        kind: Kind,
        after: Sequence[int],
        *,
        size_bytes: float = 0.0,
        layer: int = NONE,
    ) -> int:
        return self.to.op(
            f"r0 {name}",
            queue,
            duration_s,
            kind,
            after,
            size_bytes=size_bytes,
            layer=layer,
            worker=0,
        )
