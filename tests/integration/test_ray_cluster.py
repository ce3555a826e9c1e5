"""The connection to Ray, as the process that makes it sees it."""

from __future__ import annotations

import os
import signal

from runtime_rewriter.ray_cluster import RayCluster, RayPlace


def test_private_clusters_follow_each_other_in_one_process_and_leave_its_handler_of_sigterm_alone() -> None:
    handler, tokens = signal.getsignal(signal.SIGTERM), set()
    for _ in range(2):
        cluster = RayCluster(RayPlace(), 1)
        tokens.add(os.environ["RAY_AUTH_TOKEN"])
        cluster.close()
    assert len(tokens) == 2
    assert signal.getsignal(signal.SIGTERM) is handler
