"""Importing this module registers all what-ifs."""

from autotune.whatif.changes import (
    batchnorm,
    blueconnect,
    compression,
    distributed,
    elementwise,
    encoding,
    graphs,
    hardware,
    kernel_times,
    metaflow,
    network,
    offloading,
    p3,
)

__all__ = [
    "batchnorm",
    "blueconnect",
    "compression",
    "distributed",
    "elementwise",
    "encoding",
    "graphs",
    "hardware",
    "kernel_times",
    "metaflow",
    "network",
    "offloading",
    "p3",
]
