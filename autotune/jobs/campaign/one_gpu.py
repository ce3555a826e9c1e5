"""Run several ranks over NCCL on one GPU."""

from __future__ import annotations


def own_host_environment(rank: int) -> dict[str, str]:
    """Return variables to set before a rank starts NCCL: each rank seems alone on its host.

    NCCL refuses ranks of one host on one GPU ("Duplicate GPU detected"). Messages cross the
    loopback's sockets. The kernels are NCCL's own, but the ranks take turns on the GPU, so the time
    of a message is not that of a cluster.
    """
    return {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
