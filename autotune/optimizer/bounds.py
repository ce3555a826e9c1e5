"""What no synchronization can be faster than: by the links' rates, and by when gradients are there and are needed again."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from autotune.cluster import Cluster
from autotune.costs.timing import needed_times_s, ready_times_s
from autotune.workload import Workload


def least_transfer_s(cluster: Cluster, sent_bytes: float) -> float:
    """T_comm: no synchronization of messages of `sent_bytes` in all is faster, by the rates of the links alone.

    A bound without any latency. Of n hosts with b_i bytes per second each way, host i owns the share f_i of the S bytes and has
    to send and to receive S (1 + f_i (n - 2)); the best shares give max(S / min b_i, 2 (n - 1) S / sum b_i), the ring's time where
    all b_i are alike. What moves inside hosts is left out where there are several; of a single host its n devices count.
    """
    if cluster.world_size == 1:
        return 0.0
    hosts = cluster.hosts
    links = (
        [host.link_bytes_per_s for host in hosts]
        if len(hosts) > 1
        else [hosts[0].inner_bytes_per_s] * hosts[0].devices
    )
    for pair in cluster.pair_links:
        for number, host in enumerate(hosts):
            links[number] += pair.link_bytes_per_s if host.name in pair.between else 0.0
    return sent_bytes * max(1 / min(links), 2 * (len(links) - 1) / sum(links))


def least_step_s(workload: Workload, cluster: Cluster) -> float:
    """No step that sends every gradient without loss and uses it in the next step is faster, however it is synchronized.

    Tighter than max(T_comp, T_comm): a gradient is not sent before it is ready, and what is computed from where its variable is read
    next comes after it. Of a sparse gradient the rows that one rank's step touches count. As `least_transfer_s`, without any latency.
    """
    ready_s, needed_s = ready_times_s(workload).tolist(), needed_times_s(workload).tolist()
    sent_s = [
        least_transfer_s(cluster, variable.touched_share * variable.grad_bytes)
        for variable in workload.variables
    ]
    return max(
        workload.compute_s,
        interruptible_s(ready_s, sent_s, [workload.forward_s - at_s for at_s in needed_s]),
    )


def interruptible_s(
    ready_s: Sequence[float], cost_s: Sequence[float], tail_s: Sequence[float]
) -> float:
    """The least max(end + tail) on one channel on which messages may interrupt each other; all of shape (M,).

    Jackson's preemptive schedule: at any time the one with the longest tail is sent. No schedule is shorter (Carlier, European Journal
    of Operational Research 11, 1982, sec. 2), so it bounds `cross_step.planned_order`.
    """
    arrivals = sorted(range(len(ready_s)), key=ready_s.__getitem__)
    left_s, waiting = list(cost_s), list[tuple[float, int]]()
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
