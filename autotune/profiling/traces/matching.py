"""Which collectives of different ranks are one.

Members of a collective carry the same transaction id, or the same sequence number in the same group, where the trace tells them. Else
the k-th collective of a kind and size that a group issues in a step on one rank is the k-th on the others; sizes count only where they
must agree (an all-to-all may send a different amount from every rank). So work that two threads of a backend begin in another order on
another rank is matched all the same.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.profiling.traces.collectives import Collective
from autotune.profiling.traces.comm_args import MUTUAL
from autotune.profiling.traces.rank_trace import MISSING, Comm, Repair

SIZES_AGREE = frozenset({"all_reduce", "broadcast", "reduce", "message"})
POINT_TO_POINT = frozenset({"send", "recv"})


@dataclass(frozen=True)
class Joint:
    """One collective of the job. `members`: (rank's place in the job, index in its list of collectives), by rank's place.

    `mutual`: no member can end before all have begun. `root` is a place in `members`, MISSING where there is none or it is unknown.
    `complete`: every rank of the group is there. `family` is equal for the same collective of other steps.
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


def match_collectives(
    ranks: Sequence[int],
    step_numbers: Sequence[Sequence[int]],
    lists: Sequence[Sequence[Collective]],
    world_size: int,
) -> tuple[list[Joint], list[Repair]]:
    """`ranks` (R,): rank of each place; `step_numbers`: of every place, the number of each of its steps; `lists`: of every place.

    Returns the joint collectives in the order of the first place that has them, and what did not match.
    """
    found: dict[tuple[object, ...], dict[int, int]] = {}
    for place, collectives in enumerate(lists):
        seen: Counter[tuple[object, ...]] = Counter()
        for index, one in enumerate(collectives):
            if one.step == MISSING:
                continue  # at the edges of a trace some ranks record more than others
            step = step_numbers[place][one.step]
            key = _key(one.comm, step, ranks[place])
            found.setdefault((*key, seen[key]), {})[place] = index
            seen[key] += 1
    return _joints(ranks, step_numbers, lists, world_size, found)


def _key(comm: Comm, step: int, rank: int) -> tuple[object, ...]:
    if comm.transaction:
        return ("transaction", comm.transaction, step)
    if comm.name in POINT_TO_POINT and comm.peer != MISSING:
        ends = (rank, comm.peer) if comm.name == "send" else (comm.peer, rank)
        return ("point to point", ends, step)
    if comm.sequence != MISSING:
        return ("sequence", comm.group, comm.group_ranks, comm.name, comm.sequence)
    size = comm.size_bytes if comm.name in SIZES_AGREE else None
    return ("order", comm.group, comm.group_ranks, comm.name, size, step)


def _joints(
    ranks: Sequence[int],
    step_numbers: Sequence[Sequence[int]],
    lists: Sequence[Sequence[Collective]],
    world_size: int,
    found: dict[tuple[object, ...], dict[int, int]],
) -> tuple[list[Joint], list[Repair]]:
    joints, alone = [], Counter[str]()
    place_of = {rank: place for place, rank in enumerate(ranks)}
    families: Counter[tuple[object, ...]] = Counter()
    for key, members in sorted(found.items(), key=lambda item: _position(item[1], lists)):
        first = lists[min(members)][members[min(members)]]
        step = step_numbers[min(members)][first.step]
        comm = first.comm
        group = comm.group_ranks or tuple(range(world_size))
        expected = {place_of[rank] for rank in group if rank in place_of}
        point_to_point = key[0] == "point to point"
        if not point_to_point and key[0] != "transaction" and expected - set(members):
            missing = sorted(ranks[place] for place in expected - set(members))
            alone[
                f"{comm.name} of group {comm.group or 'unknown'} in step {step} has no counterpart on ranks {_some(missing)}"
            ] += 1
        if len(members) < 2:
            continue
        what = (step, comm.name, comm.group, comm.group_ranks, comm.size_bytes)
        number = families[what]
        families[what] += 1
        family = f"{comm.name}/{comm.group or 'all'}/{comm.size_bytes:.0f}B/{number}"
        root = place_of.get(comm.root, MISSING) if comm.root != MISSING else MISSING
        if point_to_point:
            root = next(
                (
                    place
                    for place, index in members.items()
                    if lists[place][index].comm.name == "send"
                ),
                MISSING,
            )
        joints.append(
            Joint(
                f"{step}/{comm.transaction or family}",
                comm.name,
                family,
                step,
                max(lists[place][index].comm.size_bytes for place, index in members.items()),
                tuple(sorted(members.items())),
                comm.name in MUTUAL or comm.name == "message",
                root,
                len(members) == (2 if point_to_point else len(group)),
            )
        )
    return joints, [
        Repair(f"a collective could not be matched: {what}", count)
        for what, count in _shortened(alone)
    ]


def _position(members: dict[int, int], lists: Sequence[Sequence[Collective]]) -> tuple[int, int]:
    place = min(members)
    return place, members[place]


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (
        f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    )


def _shortened(alone: Counter[str], most: int = 10) -> list[tuple[str, int]]:
    """The most frequent kinds, the rest as one line."""
    common = alone.most_common(most)
    rest = sum(alone.values()) - sum(count for _, count in common)
    return common + ([("others", rest)] if rest else [])


def collectives_by_place(joints: Sequence[Joint], places: int) -> list[dict[int, int]]:
    """Of every place: index in its list of collectives -> number of the joint."""
    tables: list[dict[int, int]] = [defaultdict(int) for _ in range(places)]
    for number, joint in enumerate(joints):
        for place, index in joint.members:
            tables[place][index] = number
    return tables
