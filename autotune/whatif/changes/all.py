"""Importing this module registers all what-ifs."""

from autotune.whatif.changes import (
    batchnorm,
    elementwise,
    encoding,
    graphs,
    hardware,
    kernel_times,
    metaflow,
    offloading,
)

__all__ = [
    "batchnorm",
    "elementwise",
    "encoding",
    "graphs",
    "hardware",
    "kernel_times",
    "metaflow",
    "offloading",
]
