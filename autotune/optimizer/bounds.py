"""Lower bounds of a step by the links' rates, and by when gradients are ready and needed."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from autotune.cluster import Cluster
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
    hosts = cluster.hosts
    rates = [host.link_bytes_per_s for host in hosts]
    if len(hosts) == 1:
        rates = [hosts[0].inner_bytes_per_s] * hosts[0].devices
    for pair in cluster.pair_links:
        for number, host in enumerate(hosts):
            rates[number] += pair.link_bytes_per_s if host.name in pair.between else 0.0
    return sent_bytes * max(1 / min(rates), 2 * (len(rates) - 1) / sum(rates))


def least_step_s(workload: Workload, cluster: Cluster) -> float:
    """A lower bound of any step that sends every gradient without loss for the next step.

    It is tighter than max(T_comp, T_comm): a gradient is sent after it is ready, and the
    computation from its variable's next read follows it. Sparse gradients count with the rows that
    one rank's step touches. The bound ignores latency.
    """
    sent_s = [
        least_transfer_s(cluster, variable.touched_share * variable.grad_bytes)
        for variable in workload.variables
    ]
    tail_s = (workload.forward_s - needed_times_s(workload)).tolist()
    return max(
        workload.compute_s, interruptible_s(ready_times_s(workload).tolist(), sent_s, tail_s)
    )


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
