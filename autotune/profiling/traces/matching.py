"""Matches the collectives of different ranks.

Members of a collective carry the same transaction id, or the same sequence number in the same
group, where the traces state them. Else the k-th collective of a kind and size that a group issues
in a step on one rank is the k-th one on the others. Sizes count only where they must agree: an
all-to-all may send a different amount from every rank. So collectives that two threads of a backend
begin in another order on another rank still match.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autotune.profiling.formats.collective_args import MUTUAL
from autotune.profiling.formats.rank_trace import MISSING, Comm, Repair
from autotune.profiling.traces.collectives import TracedCollective
from autotune.profiling.traces.groups import GroupNumbers

SIZES_AGREE = frozenset({"all_reduce", "broadcast", "reduce", "message"})
POINT_TO_POINT = frozenset({"send", "recv"})
_SHOWN_RANKS, _SHOWN_REPAIRS = 8, 10

_Key = tuple[object, ...]


@dataclass(frozen=True)
class Joint:
    """One collective of the job.

    - `members`: (rank's place in the job, index in its list of collectives), by place.
    - `mutual`: no member can end before all have begun.
    - `root`: a place in `members`, MISSING where there is none or it is unknown. That of a send and
      its receive is the sender.
    - `complete`: every rank of the group is present.
    - `family`: equal for the same collective of other steps.
    """

    transaction: str
    name: str
    family: str
    step: int
    size_bytes: float
    members: tuple[tuple[int, int], ...]
    mutual: bool
    root: int
    complete: bool

    @property
    def is_pair(self) -> bool:
        """Whether this is a send and its receive."""
        return self.name in POINT_TO_POINT and self.root != MISSING

    @property
    def aligns(self) -> bool:
        """Whether the order of its members' times limits the offsets of their clocks."""
        return self.mutual or self.is_pair


def match_collectives(
    ranks: Sequence[int],
    step_numbers: Sequence[Sequence[int]],
    lists: Sequence[Sequence[TracedCollective]],
    world_size: int,
) -> tuple[list[Joint], list[Repair]]:
    """Match the collectives in `lists` (R,), one list per place.

    `ranks` (R,): rank of each place. `step_numbers`: numbers of each place's steps. Returns the
    joint collectives in the order of the first place that has them, and what did not match.
    """
    groups = GroupNumbers()
    members_of: dict[_Key, dict[int, int]] = {}
    for place, collectives in enumerate(lists):
        occurrences: Counter[_Key] = Counter()
        for index, one in enumerate(collectives):
            if one.step == MISSING:
                continue  # at the edges of a trace some ranks record more than others
            key = _key(one.comm, step_numbers[place][one.step], ranks[place], groups)
            members_of.setdefault((*key, occurrences[key]), {})[place] = index
            occurrences[key] += 1
    place_of = {rank: place for place, rank in enumerate(ranks)}
    joints: list[Joint] = []
    alone: Counter[str] = Counter()
    families: Counter[_Key] = Counter()
    for key, members in sorted(members_of.items(), key=lambda item: min(item[1].items())):
        first_place, first_index = min(members.items())
        first = lists[first_place][first_index]
        step, comm = step_numbers[first_place][first.step], first.comm
        group = comm.group_ranks or tuple(place_of)
        missing = sorted(r for r in group if r in place_of and place_of[r] not in members)
        if missing and key[0] not in ("point to point", "transaction"):
            what = f"{comm.name} of group {comm.group or 'unknown'} in step {step}"
            alone[f"{what} has no counterpart on ranks {_shown(missing)}"] += 1
        if len(members) < 2:
            continue
        comms = {place: lists[place][index].comm for place, index in members.items()}
        root, expected = place_of.get(comm.root, MISSING), len(comm.group_ranks)
        who = comm.name
        if key[0] == "point to point" or comm.name in POINT_TO_POINT:
            root, expected = _sender(comms), 2
            who += "".join(f" {ranks[place]}" for place in sorted(comms))
        same = (step, who, comm.group, groups.number(comm.group_ranks), comm.size_bytes)
        family = f"{who}/{comm.group or 'all'}/{comm.size_bytes:.0f}B/{families[same]}"
        families[same] += 1
        joints.append(
            Joint(
                transaction=f"{step}/{comm.transaction or family}",
                name=comm.name,
                family=family,
                step=step,
                size_bytes=max(member.size_bytes for member in comms.values()),
                members=tuple(sorted(members.items())),
                mutual=comm.name in MUTUAL or comm.name == "message",
                root=root,
                complete=len(members) == (expected or world_size),
            )
        )
    return joints, _repairs(alone)


def _key(comm: Comm, step: int, rank: int, groups: GroupNumbers) -> _Key:
    if comm.transaction:
        return ("transaction", comm.transaction, step)
    if comm.name in POINT_TO_POINT and comm.peer != MISSING:
        ends = (rank, comm.peer) if comm.name == "send" else (comm.peer, rank)
        return ("point to point", ends, step)
    group = (comm.group, groups.number(comm.group_ranks))
    if comm.sequence != MISSING:
        return ("sequence", *group, comm.name, comm.sequence)
    size = comm.size_bytes if comm.name in SIZES_AGREE else None
    return ("order", *group, comm.name, size, step)


def _sender(comms: Mapping[int, Comm]) -> int:
    """The place that sends in a pair of a send and a receive, MISSING for other members."""
    place_of = {comm.name: place for place, comm in comms.items()}
    return place_of["send"] if len(comms) == 2 and set(place_of) == POINT_TO_POINT else MISSING


def _shown(numbers: list[int]) -> str:
    more = len(numbers) - _SHOWN_RANKS
    listed = ", ".join(map(str, numbers[:_SHOWN_RANKS]))
    return f"{listed} and {more} more" if more > 0 else listed


def _repairs(alone: Counter[str]) -> list[Repair]:
    """The most frequent kinds; the rest as one repair."""
    common = alone.most_common(_SHOWN_REPAIRS)
    rest = alone.total() - sum(count for _, count in common)
    kinds = [*common, ("others", rest)] if rest else common
    return [Repair(f"a collective could not be matched: {what}", count) for what, count in kinds]
