"""The process groups of a step's collectives: data parallelism has one, of all ranks."""

from __future__ import annotations

from collections.abc import Iterable

from autotune.errors import InvalidInput
from autotune.profiling.formats.rank_trace import number_ranges
from autotune.profiling.traces.collectives import TracedCollective

Groups = tuple[tuple[int, ...], ...]
_MOST_SHOWN = 4


def process_groups(collectives: Iterable[TracedCollective]) -> Groups:
    """The different sets of ranks that exchange something, as far as the trace states them.

    DDP has several process groups of the same ranks: they are one set here.
    """
    stated = {one.comm.group_ranks for one in collectives}
    return tuple(sorted({tuple(sorted(set(ranks))) for ranks in stated if len(set(ranks)) > 1}))


def require_one_group(groups: Groups, world_size: int | None) -> None:
    """Raise `InvalidInput` for several groups, or one without all ranks.

    Groups that the trace does not state are taken to be of all ranks.
    """
    if not groups or (len(groups) == 1 and world_size in (None, len(groups[0]))):
        return
    shown = " and ".join(number_ranges(ranks) for ranks in groups[:_MOST_SHOWN])
    more = f" and {len(groups) - _MOST_SHOWN} more" if len(groups) > _MOST_SHOWN else ""
    of_ranks = "" if world_size is None else f" of {world_size} ranks"
    raise InvalidInput(
        "messages are predicted for data parallelism over one group of all ranks, but the step's "
        f"collectives are of the ranks {shown}{more}{of_ranks}, as in tensor, pipeline or hybrid "
        "sharded parallelism; use a trace of data-parallel training"
    )
