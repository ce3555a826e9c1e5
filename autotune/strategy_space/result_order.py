"""The order in which the results of a plan's messages are sent once all norms are known.

A script that clips by the global norm needs every summed gradient before its first update. So only
the second half of each exchange, from the owner of a sum to all ranks, can cross the step. Nothing
holds these halves back but the norms, so the best order on one link is that of the next forward
pass: the earliest due first (Jackson's rule, 1955).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autotune.workload import Workload


def result_order(messages: Sequence[Iterable[str]], workload: Workload) -> tuple[int, ...]:
    """Return the numbers of `messages`, each the names of its variables, by their first read.

    Variables without measured reads count as read in reverse backward order.
    """
    reads = [variable.needed_s for variable in workload.variables]
    measured = [at_s for at_s in reads if at_s is not None]
    if len(measured) < len(reads):
        measured = [-float(position) for position in range(len(reads))]
    index = workload.index
    first = [min(measured[index[name]] for name in names) for names in messages]
    return tuple(sorted(range(len(messages)), key=lambda number: (first[number], number)))
