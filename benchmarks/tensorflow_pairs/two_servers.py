"""Two TensorFlow servers of this process, for a session that drives both."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from runtime_rewriter.tensorflow.servers import JOB, reserved_port, session_config


class TwoServers:
    """Start it in a network namespace: the servers listen without authentication."""

    hosts = ((0,), (1,))
    devices = tuple(f"/job:{JOB}/replica:0/task:{rank}/device:CPU:0" for rank in range(2))

    def __init__(self) -> None:
        with reserved_port() as first, reserved_port() as second:
            addresses = [f"127.0.0.1:{port}" for port in (first, second)]
        cluster = tf.train.ClusterSpec({JOB: addresses})
        self.own = [
            tf.distribute.Server(cluster, job_name=JOB, task_index=rank, config=session_config())
            for rank in range(2)
        ]

    @property
    def target(self) -> str:
        target: str = self.own[0].target
        return target

    @property
    def config(self) -> Any:
        return session_config()
