"""The model on which synchronization across steps is compared: sizes and times of its layers.

Of the ten layers that take time the last ones to compute are the largest, as in a network that ends in wide dense layers: their
gradients are ready first and needed last. One step computes for 242 ms; on four ranks at 1 Gbit/s a ring moves its gradients in 254 ms.
"""

from __future__ import annotations

from autotune.workload import Workload
from benchmarks.layered import Layer, workload_of

LAYERS = (
    (2_000, 0.030),
    (20_000, 0.030),
    (80_000, 0.030),
    (150_000, 0.030),
    (300_000, 0.030),
    (300_000, 0.030),
    (600_000, 0.020),
    (600_000, 0.020),
    (2_000_000, 0.006),
    (1_000_000, 0.004),
    (10_000, 0.001),
)
"""(parameters, seconds of one step) of every layer, from the input to the loss."""


def workload() -> Workload:
    """One float32 variable per layer."""
    return workload_of("cross-step", [Layer(((parameters,),), seconds) for parameters, seconds in LAYERS])
