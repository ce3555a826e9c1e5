"""Refuses Horovod's own autotuner, which changes Horovod's settings between steps.

It varies the cycle time, the fusion threshold and the cache of responses, and begins again whenever
Horovod starts. Steps under different settings cannot be compared, and the cache decides the order
of a plan's messages.
"""

from __future__ import annotations

from collections.abc import Mapping

from autotune.errors import InvalidInput

_VARIABLE = "HOROVOD_AUTOTUNE"


def check_own_autotuner(environment: Mapping[str, str]) -> None:
    """Raise `InvalidInput` if Horovod's own autotuner is on in this environment."""
    value = environment.get(_VARIABLE, "").strip()
    if value.isdecimal() and int(value) > 0:  # as Horovod reads it
        raise own_autotuner_refusal(f"{_VARIABLE}={value}")


def own_autotuner_refusal(turned_on_by: str) -> InvalidInput:
    """The error for a script whose Horovod tunes itself."""
    return InvalidInput(
        "Horovod's own autotuner must be off, since it changes the cycle time, the fusion "
        f"threshold and the cache between steps, but {turned_on_by} turns it on; leave that out, "
        "and set the best row of its log (HOROVOD_AUTOTUNE_LOG) by HOROVOD_CYCLE_TIME in ms and "
        "HOROVOD_FUSION_THRESHOLD in bytes"
    )
