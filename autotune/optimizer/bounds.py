"""Lower bounds of a step by the links' rates, and by when gradients are ready and needed."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from autotune.arrays import FloatArray
from autotune.cluster import Cluster
from autotune.costs.row_traffic import summed_share
from autotune.costs.timing import needed_times_s, ready_times_s
from autotune.workload import Workload


def least_transfer_s(cluster: Cluster, sent_bytes: float) -> float:
    """T_comm: by the rates of the links, no synchronization of `sent_bytes` in all is faster.

    The bound ignores latency. There are n hosts with b_i bytes per second each way. Host i owns the
    share f_i of the S bytes, and must send and receive S (1 + f_i (n - 2)). The best shares give
    max(S / min b_i, 2 (n - 1) S / sum b_i), the time of a ring if all b_i are equal. Transfers
    within hosts count only if there is one host, by its n devices.
    """
    if cluster.world_size == 1:
        return 0.0
    rates = [rate for rate, _ in _ports(cluster)]
    return sent_bytes * max(1 / min(rates), 2 * (len(rates) - 1) / sum(rates))


def least_synchronization_s(workload: Workload, cluster: Cluster) -> float:
    """T_comm of all gradients; of sparse ones only touched rows travel."""
    return float(_link_s(workload, cluster).sum(axis=0).max(initial=0.0))


def least_step_s(workload: Workload, cluster: Cluster) -> float:
    """A lower bound of any step that sends every gradient without loss for the next step.

    It is tighter than max(T_comp, T_comm): a gradient is sent after it is ready, and the
    computation from its variable's next read follows it. The bound ignores latency.
    """
    ready_s = ready_times_s(workload).tolist()
    tail_s = (workload.forward_s - needed_times_s(workload)).tolist()
    synchronized_s = (
        interruptible_s(ready_s, busy_s, tail_s) for busy_s in _link_s(workload, cluster).T.tolist()
    )
    return max(workload.compute_s, *synchronized_s)


def interruptible_s(
    ready_s: Sequence[float], cost_s: Sequence[float], tail_s: Sequence[float]
) -> float:
    """The least max(end + tail) on one channel with interruptible messages; all of shape (M,).

    Jackson's preemptive schedule always sends the message with the longest tail. No schedule is
    shorter (Carlier, European Journal of Operational Research 11, 1982, sec. 2), so it bounds
    `issue_order.planned_order`.
    """
    arrivals = sorted(range(len(ready_s)), key=ready_s.__getitem__)
    left_s = list(cost_s)
    waiting: list[tuple[float, int]] = []
    now_s, longest_s, following = 0.0, 0.0, 0
    while waiting or following < len(arrivals):
        if not waiting:
            now_s = max(now_s, ready_s[arrivals[following]])
        while following < len(arrivals) and ready_s[arrivals[following]] <= now_s:
            heapq.heappush(waiting, (-tail_s[arrivals[following]], arrivals[following]))
            following += 1
        number = waiting[0][1]
        until_s = ready_s[arrivals[following]] if following < len(arrivals) else float("inf")
        if now_s + left_s[number] > until_s:
            left_s[number] -= until_s - now_s
            now_s = until_s
            continue
        now_s += left_s[number]
        heapq.heappop(waiting)
        longest_s = max(longest_s, now_s + tail_s[number])
    return longest_s


def _link_s(workload: Workload, cluster: Cluster) -> FloatArray:
    """How long each variable keeps each host's link busy at least, and all links together (last).

    Shape (V, H + 1). With one host its devices count. Of a dense gradient of S bytes each host
    sends and receives S, and all n hosts together 2 (n - 1) S (`least_transfer_s`). Of a sparse one
    each host receives the rows that ranks elsewhere touch, each row once: with d of the R ranks,
    the share 1 - (1 - t)^(R - d) of all rows (`autotune.costs.row_traffic`). All together have to
    sum at least the rows of one rank.
    """
    ports, ranks = _ports(cluster), cluster.world_size
    if ranks == 1:
        return np.zeros((len(workload.variables), 1))
    rates, devices = np.array(ports).T
    shares = np.array([variable.touched_share for variable in workload.variables])
    elsewhere = summed_share(shares[:, None], ranks - devices)
    received = np.column_stack([elsewhere, elsewhere.sum(axis=1)])
    received[:, -1] = np.maximum(received[:, -1], 2 * (len(ports) - 1) * shares)
    size = np.array([variable.grad_bytes for variable in workload.variables])
    busy_s: FloatArray = size[:, None] * received / np.append(rates, rates.sum())
    return busy_s


def _ports(cluster: Cluster) -> list[tuple[float, int]]:
    """Bytes per second each way, and ranks, of every host; of every device if there is one host."""
    hosts = cluster.hosts
    if len(hosts) == 1:
        return [(hosts[0].inner_bytes_per_s, 1)] * hosts[0].devices
    rates = [host.link_bytes_per_s for host in hosts]
    for pair in cluster.pair_links:
        for number, host in enumerate(hosts):
            rates[number] += pair.link_bytes_per_s if host.name in pair.between else 0.0
    return [(rate, host.devices) for rate, host in zip(rates, hosts, strict=True)]
