"""Refuses `hvd.join()` where it would let ranks wait for each other.

A rank that has joined takes part in Horovod's own operations with zeros. It makes no further steps,
so it sends no messages of a plan, and the driver's instructions do not reach it.
"""

from __future__ import annotations

from autotune.errors import InvalidInput
from runtime_rewriter.pytorch.hooks import GradientSynchronizer


def check_join(synchronizer: GradientSynchronizer | None) -> None:
    """Raise `InvalidInput` under a plan, and while a session tunes or records. None: no model."""
    if synchronizer is None or (synchronizer.plan is None and not synchronizer.listeners):
        return
    plan = synchronizer.plan
    under = "while autotune measures steps" if plan is None else f"under a plan (here {plan.id})"
    raise InvalidInput(
        f"every rank must make the same number of steps {under}, but hvd.join() lets some ranks "
        "make fewer; drop the extra batches, so that all ranks have as many, and leave out "
        "hvd.join()"
    )
