"""Several ranks over NCCL on one GPU, which NCCL refuses to those of one host ("Duplicate GPU detected")."""

from __future__ import annotations


def as_hosts_of_their_own(rank: int) -> dict[str, str]:
    """Environment of a rank before it starts NCCL: each seems to be alone on its host, so that messages cross the loopback's sockets.

    The kernels are NCCL's own, but the ranks take turns on the GPU: how long a message takes says nothing of a cluster.
    """
    return {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
