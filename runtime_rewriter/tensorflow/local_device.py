"""The device of this process alone, for a script that no launcher started."""

from __future__ import annotations

from typing import Any

from runtime_rewriter.tensorflow.servers import session_config


class LocalDevice:
    """What a session connects to without servers: nothing listens, and there is one replica."""

    target = ""
    devices = ("/job:localhost/replica:0/task:0/device:CPU:0",)
    hosts: tuple[tuple[int, ...], ...] = ((0,),)

    @property
    def config(self) -> Any:
        config = session_config()
        config.experimental.collective_group_leader = ""
        return config
