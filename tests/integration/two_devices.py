"""Devices of this process in place of the servers of two ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class TwoDevices:
    """Implements `Target`."""

    target = ""
    devices = ("/device:CPU:0", "/device:CPU:1")
    hosts = ((0, 1),)

    @property
    def config(self) -> Any:
        config = tf.compat.v1.ConfigProto(device_count={"CPU": 2})
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        return config
