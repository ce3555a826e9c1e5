"""Gives every trace its rank, and refuses traces that cannot be the ranks of one job.

Ranks come from the traces' distributedInfo or from the user, never from a number in a file name: a
worker's files count its runs too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import PurePosixPath

from autotune.errors import InvalidInput
from autotune.limits import MAX_RANKS
from autotune.profiling.formats.limits import limited_rank
from autotune.profiling.formats.rank_trace import RankTrace, Repair
from autotune.units import format_seconds

PLACE = "{rank}"
"""Stands for the number of the rank in a pattern."""
MAX_SKEW_S = 10.0
"""Tolerated distance of traces whose clocks may differ: hosts that keep time by NTP differ by
milliseconds, those that do not by seconds."""
_SHOWN = 4
_EXAMPLES = "--ranks 'worker{rank}_*.json' or --ranks 0,1,2,3"


def ranked(traces: Sequence[RankTrace], given: str = "") -> tuple[list[RankTrace], list[Repair]]:
    """The traces in rank order, each once.

    `given`: the ranks in the order of the files, separated by commas, or a pattern of the file
    names with `{rank}` in place of the number. A single trace without a rank is rank 0. Raises
    `InvalidInput` for unknown ranks, for a rank with two traces, and for traces that do not overlap
    in time.
    """
    traces, repairs = _without_copies(traces)
    if given:
        ranks: list[int | None] = [*_given(given, traces)]
    else:
        ranks = [trace.rank for trace in traces]
    if ranks == [None]:
        ranks = [0]
        repairs.append(Repair("the trace states no rank; it is taken as rank 0"))
    _refuse_unknown(traces, ranks)
    numbered = [replace(trace, rank=rank) for trace, rank in zip(traces, ranks, strict=True)]
    numbered.sort(key=lambda trace: trace.rank or 0)
    _refuse_repeated(numbered)
    _refuse_apart(numbered)
    return numbered, repairs


def _without_copies(traces: Sequence[RankTrace]) -> tuple[list[RankTrace], list[Repair]]:
    """Keep each trace once: every host's folder has its ranks' traces, and rank 0's folder has all.

    A copy has another folder, but the same name, rank, beginning and number of events.
    """
    first_of: dict[tuple[object, ...], RankTrace] = {}
    for trace in traces:
        first_of.setdefault((_name(trace), trace.rank, trace.origin_ns, trace.events), trace)
    copies = len(traces) - len(first_of)
    repair = Repair("a trace that was given more than once is read once", copies)
    return list(first_of.values()), [repair] if copies else []


def _name(trace: RankTrace) -> str:
    return PurePosixPath(trace.source.replace(":", "/")).name


def _given(text: str, traces: Sequence[RankTrace]) -> list[int]:
    if PLACE in text:
        return [_matched(text, _name(trace)) for trace in traces]
    words = [word.strip() for word in text.split(",")]
    if len(words) != len(traces) or not all(_is_rank(word) for word in words):
        raise InvalidInput(
            f"ranks must be a pattern of file names with {PLACE}, or {len(traces)} numbers below "
            f"{MAX_RANKS} with commas between them, but are {text[:80]!r}; for example {_EXAMPLES}"
        )
    return [int(word) for word in words]


def _is_rank(word: str) -> bool:
    return word.isascii() and word.isdecimal() and len(word) <= len(str(MAX_RANKS))


def _matched(pattern: str, name: str) -> int:
    """The number in the file's name; `*` stands for any characters, `{rank}` for the number."""
    before, _, after = pattern.partition(PLACE)
    wild = [".*".join(map(re.escape, part.split("*"))) for part in (before, after)]
    match = re.fullmatch(rf"{wild[0]}(\d{{1,9}}){wild[1]}", name)
    if match is None:
        raise InvalidInput(
            f"every file name must fit the pattern {pattern[:80]!r} of --ranks, but {name} does not"
        )
    return limited_rank(int(match.group(1)))


def _refuse_unknown(traces: Sequence[RankTrace], ranks: Sequence[int | None]) -> None:
    unknown = [_name(trace) for trace, rank in zip(traces, ranks, strict=True) if rank is None]
    if unknown:
        more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
        raise InvalidInput(
            "the traces of several ranks must state their ranks (rank in distributedInfo), but "
            f"{', '.join(unknown[:_SHOWN])}{more} do not; give them, for example {_EXAMPLES}"
        )


def _refuse_repeated(traces: Sequence[RankTrace]) -> None:
    for first, second in pairwise(traces):
        if first.rank == second.rank:
            raise InvalidInput(
                f"a rank has one trace, but {first.source} and {second.source} are both of rank "
                f"{first.rank}: separate runs of one worker are no ranks of one job; name the "
                "traces of one run, or give the ranks with --ranks"
            )


def _refuse_apart(traces: Sequence[RankTrace]) -> None:
    """Refuse traces of separate runs: the ranks of one job are recorded at the same time.

    Traces of one host share its clock. Those of others may be `MAX_SKEW_S` apart.
    """
    by_end = min(traces, key=_end_ns)
    by_start = max(traces, key=lambda trace: trace.origin_ns)
    gap_s = (by_start.origin_ns - _end_ns(by_end)) * 1e-9
    shared = bool(by_end.host) and by_end.host == by_start.host
    if gap_s >= (0.0 if shared else MAX_SKEW_S):
        rule = "on one host" if shared else f"or be less than {MAX_SKEW_S:.0f} s apart"
        raise InvalidInput(
            f"the traces of a job must overlap in time {rule}, but rank {by_start.rank} begins "
            f"{format_seconds(gap_s)} after rank {by_end.rank} has ended ({by_end.source}, "
            f"{by_start.source}); name the traces of one run"
        )


def _end_ns(trace: RankTrace) -> int:
    return trace.origin_ns + round(float(trace.end_s.max()) * 1e9)
