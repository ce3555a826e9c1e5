"""The model on which synchronization across steps is compared: sizes and times of its layers.

Of the ten layers that take time the last ones to compute are the largest, as in a network that ends in wide dense layers: their
gradients are ready first and needed last. One step computes for 242 ms; on four ranks at 1 Gbit/s a ring moves its gradients in 254 ms.
"""

from __future__ import annotations

from itertools import accumulate

from autotune.workload import Variable, Workload

FORWARD_SHARE = 1 / 3

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
    """One float32 variable per layer; forward a third and backward two thirds of each layer's time."""
    forward_s = [seconds * FORWARD_SHARE for _, seconds in LAYERS]
    backward_s = [seconds - own for (_, seconds), own in zip(LAYERS, forward_s, strict=True)]
    needed_s = [end - own for end, own in zip(accumulate(forward_s), forward_s, strict=True)]
    ready_s = list(accumulate(reversed(backward_s)))[::-1]
    variables = tuple(
        Variable(f"{number}.weight", (parameters,), ready_s=ready_s[number], needed_s=needed_s[number])
        for number, (parameters, _) in enumerate(LAYERS)
    )
    return Workload("cross-step", variables[::-1], (), sum(forward_s), sum(backward_s), 0.0)
