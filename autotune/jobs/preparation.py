"""Load what the first round of proposals needs while the workers start."""

from __future__ import annotations

import threading

from autotune.garbage import collection_paused


def prepare_in_background() -> None:
    """Import the optimizer and load its compiled replay on a thread.

    Both take seconds, in which the ranks would wait between two trials.
    """
    threading.Thread(target=_prepare, name="prepare the search", daemon=True).start()


def _prepare() -> None:
    with collection_paused():
        import autotune.optimizer.suggest  # noqa: F401 - heavy, as it imports numba
        from autotune.dfg.build import DfgBuilder
        from autotune.dfg.graph import Kind
        from autotune.dfg.replay import replay

    graph = DfgBuilder()
    lock = graph.lock()  # with a lock, replay runs the kernel that lowered plans need
    queue = graph.queue("queue")
    graph.op("op", queue, 1.0, Kind.OTHER, acquires=lock, releases=lock)
    replay(graph.build())
