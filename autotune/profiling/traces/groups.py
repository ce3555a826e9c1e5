"""The process groups of collectives: data parallelism has one, of all ranks."""

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


class GroupNumbers:
    """A small number for each group's ranks, by which members are compared.

    A group may have 100 000 ranks, and Python hashes a tuple anew for every member. The tuples that
    are passed must live as long as this object: each one is recognized by its identity.
    """

    def __init__(self) -> None:
        self._number_of: dict[tuple[int, ...], int] = {}
        self._number_of_object: dict[int, int] = {}

    def number(self, ranks: tuple[int, ...]) -> int:
        number = self._number_of_object.get(id(ranks))
        if number is None:
            number = self._number_of.setdefault(ranks, len(self._number_of))
            self._number_of_object[id(ranks)] = number
        return number
