"""Scale a model's times to a given ratio of computation to communication.

The ratio is time(computation of one replica) / time(ring of all gradients). The ring is the
exchange of torch's DDP: a rank sends 2 (N - 1) / N of the dense bytes and receives as many
(Patarasuk and Yuan 2009). Rows of sparse gradients are gathered: N - 1 times those of one rank. The
ring passes the slowest host's link once in each direction. Rates are those of the cluster file.
"""

from __future__ import annotations

from dataclasses import replace

from autotune.cluster import Cluster
from autotune.errors import InvalidInput
from autotune.workload import Variable, Workload


def ring_s(workload: Workload, cluster: Cluster) -> float:
    """Return the time of a ring with all gradients of one step, without latency."""
    ranks = cluster.world_size
    dense = sum(variable.grad_bytes for variable in workload.variables if not variable.sparse)
    rows = sum(v.touched_share * v.grad_bytes for v in workload.variables if v.sparse)
    slowest = min(host.link_bytes_per_s for host in cluster.hosts)
    return (2 * (ranks - 1) / ranks * dense + (ranks - 1) * rows) / slowest


def balanced(workload: Workload, cluster: Cluster, ratio: float) -> Workload:
    """Scale all times such that one replica computes `ratio` times as long as the ring takes.

    The times count as assumed from then on. Raises `InvalidInput` for a ratio or a computation
    that is not above 0.
    """
    if not ratio > 0 or not workload.compute_s > 0:
        raise InvalidInput(
            "a ratio of computation to communication needs a ratio and a computation above 0, "
            f"but the ratio is {ratio} and {workload.model!r} computes for {workload.compute_s} s"
        )
    factor = ratio * ring_s(workload, cluster) / workload.compute_s
    return replace(
        workload,
        variables=tuple(_scaled(variable, factor) for variable in workload.variables),
        forward_s=workload.forward_s * factor,
        backward_s=workload.backward_s * factor,
        update_s=workload.update_s * factor,
        source="assumed",
    )


def _scaled(variable: Variable, factor: float) -> Variable:
    def times(value: float | None) -> float | None:
        return None if value is None else value * factor

    return replace(
        variable,
        ready_s=times(variable.ready_s),
        needed_s=times(variable.needed_s),
        script_read_s=times(variable.script_read_s),
    )
