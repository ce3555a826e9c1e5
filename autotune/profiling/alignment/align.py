"""Finds the offsets and drifts of all ranks' clocks from their collectives and messages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from autotune.arrays import BoolArray, FloatArray, IntArray
from autotune.errors import InvalidInput, MissingExtra, install_extra
from autotune.profiling.alignment.drift import MOST_DRIFT, machines, matters, middles_s, rough_drift
from autotune.profiling.alignment.guess import first_guess
from autotune.profiling.alignment.intervals import feasible_intervals
from autotune.profiling.alignment.observations import Observations, observe
from autotune.profiling.alignment.result import Alignment
from autotune.profiling.alignment.same_clock import with_shared_clocks
from autotune.profiling.traces.job import TraceJob

if TYPE_CHECKING:
    from autotune.profiling.alignment.program import Drifts, Program

MOST_MEMBERS = 20_000
"""Members of collectives in the convex program, about; it takes evenly spaced collectives.

The intervals always use all."""
FEWEST_TIES = 8
"""Collectives of the same members that connect ranks, so that none of them decides alone."""
GOLDEN = (5**0.5 - 1) / 2
SAMPLES = 16
FEW_MEMBERS = 5_000
"""Above this, a quarter of the bootstrap samples is drawn."""
LEAST_SLACK_S = 2e-8


def align(job: TraceJob, samples: int = SAMPLES, seed: int = 0) -> Alignment:
    """One clock for all ranks of `job`; the spread comes from `samples` bootstrap samples.

    Raises `InvalidInput` where several ranks share no collective and no message at all.
    """
    return align_observations(observe(job), samples, seed, job.hosts.assumed)


def align_observations(
    observed: Observations, samples: int = SAMPLES, seed: int = 0, hosts_assumed: bool = False
) -> Alignment:
    """One clock for all observed ranks.

    With `hosts_assumed`, hosts that the clocks contradict are given up. Raises `MissingExtra`
    without CVXPY, and `InvalidInput` as `align` does.
    """
    zeros = np.zeros(observed.ranks)
    if observed.ranks == 1:
        return Alignment(
            *(zeros, zeros, zeros, zeros),
            slack_s=np.empty(0),
            transactions=(),
            end_spread_s=(0.0, 0.0),
            drift=zeros,
            drift_spread=zeros,
            middle_s=zeros,
            notes=("one rank: nothing to align",),
        )
    if not observed.collectives:
        raise InvalidInput(
            "clocks are aligned by collectives and by messages of two ranks, but no collective was "
            "matched across ranks; see the job's repairs"
        )
    if find_spec("cvxpy") is None:
        raise MissingExtra(
            "the clocks of several ranks are aligned by CVXPY, which is not installed; "
            + install_extra("align")
        )
    from autotune.profiling.alignment.program import Program, noise_of

    hosts_unknown = bool((observed.hosts < 0).any())
    guess = first_guess(replace(observed, hosts=np.full(observed.ranks, -1)))
    noise_s = noise_of(observed, guess.offset_s).end_s
    noise_s = max(noise_s, float(guess.error_s[np.isfinite(guess.error_s)].max(initial=0.0)))
    observed, notes = with_shared_clocks(observed, guess.offset_s, noise_s, hosts_assumed)
    used, thinning = _thinned(observed)
    drifts, error = _drifts(used, guess.offset_s)
    used = used.drifted(drifts.rough, drifts.middle_s)
    guess = first_guess(observed.drifted(drifts.rough, drifts.middle_s))
    program = Program(used, noise_of(used, guess.offset_s), guess, drifts)
    clocks = program.solve(np.stack([guess.offset_s, zeros]))
    drift = (1 + drifts.rough) * (1 + clocks[1]) - 1
    offset_s, moved = clocks[0], observed.drifted(drift, drifts.middle_s)
    slack_s = moved.violation_s(offset_s)
    slack_s[slack_s < LEAST_SLACK_S] = 0.0
    low_s, high_s = feasible_intervals(moved, slack_s + LEAST_SLACK_S)
    apart = ~np.isfinite(high_s - low_s)
    apart &= ~np.isin(observed.hosts, observed.hosts[~apart & (observed.hosts >= 0)])
    offset_s = np.where(apart, 0.0, offset_s)
    spread = _bootstrap(program, clocks, samples, np.random.default_rng(seed))
    return Alignment(
        offset_s,
        low_s,
        high_s,
        spread_s=np.where(guess.spread_s > 0, np.fmax(spread[0], guess.spread_s), spread[0]),
        slack_s=slack_s,
        transactions=observed.transactions,
        end_spread_s=(_median(observed.end_spread_s(zeros)), _median(moved.end_spread_s(offset_s))),
        drift=drift,
        drift_spread=np.where(drifts.free, spread[1], error),
        middle_s=drifts.middle_s,
        notes=(*notes, *thinning, *_notes(slack_s, apart, drift, hosts_unknown)),
    )


def _median(values: FloatArray) -> float:
    return float(np.median(values)) if len(values) else 0.0


def _drifts(observed: Observations, guess_s: FloatArray) -> tuple[Drifts, FloatArray]:
    """The clocks that drift with their rough drifts, and the errors (R,) of these."""
    from autotune.profiling.alignment.program import LEAST_NOISE_S, Drifts, noise_of

    machine = machines(observed.hosts)
    middle_s = middles_s(observed, machine)
    rough, error = rough_drift(observed, machine, middle_s, guess_s)
    free = matters(observed, rough, error, noise_of(observed, guess_s).end_s, LEAST_NOISE_S)
    bounded = np.where(free, np.clip(rough, -MOST_DRIFT, MOST_DRIFT), 0.0)
    return Drifts(machine, middle_s, bounded, free), error


def _notes(
    slack_s: FloatArray, apart: BoolArray, drift: FloatArray, hosts_unknown: bool
) -> list[str]:
    notes = []
    if slack_s.any():
        broken, worst_us = int((slack_s > 0).sum()), slack_s.max() * 1e6
        what = f"{broken} of {len(slack_s)} collectives"
        notes.append(f"{what} break the order of events by up to {worst_us:.1f} us")
    if apart.any():
        places = np.flatnonzero(apart)[:8].tolist()
        notes.append(
            f"ranks at places {places} share no collective with the first, and no messages in "
            "both directions; their clocks are as they were"
        )
    if hosts_unknown:
        notes.append(
            "the traces do not state the hosts, so clocks of one host are not tied to each other"
        )
    fastest = float(np.abs(drift).max())
    if fastest >= 0.999 * MOST_DRIFT:
        notes.append(
            f"a clock drifts by {fastest * 1e6:.0f} ppm, the allowed limit: was it set during the "
            "recording?"
        )
    return notes


def _thinned(observed: Observations) -> tuple[Observations, list[str]]:
    """Reduce the collectives to evenly spaced ones of every family, where there are too many.

    All ranks that the collectives connect stay connected, by `FEWEST_TIES` collectives or all.
    """
    if observed.members <= MOST_MEMBERS:
        return observed, []
    share = max(MOST_MEMBERS / observed.members, FEWEST_TIES / observed.collectives)
    mask = _spaced(observed.family, min(share, 1.0))
    for collectives in _ties(observed, mask):
        places = np.linspace(0, len(collectives) - 1, min(FEWEST_TIES, len(collectives)))
        mask[collectives[places.astype(np.int64)]] = True
    chosen = np.flatnonzero(mask)
    what = f"{len(chosen)} of {observed.collectives} collectives, evenly spaced in each family"
    return observed.chosen(chosen), [f"{what}, used to find the offsets"]


def _spaced(family: IntArray, share: float) -> BoolArray:
    """(K,) a mask of `share` of each family, evenly spaced.

    Families begin at different phases of the spacing, so together they cover all steps.
    """
    order = np.argsort(family, kind="stable")
    starts = np.concatenate([[0], np.flatnonzero(np.diff(family[order])) + 1])
    sizes = np.diff([*starts, len(family)])
    phase = np.repeat(np.arange(len(starts)) * GOLDEN % 1.0, sizes)
    place = np.arange(len(family)) - np.repeat(starts, sizes)
    mask = np.zeros(len(family), dtype=np.bool_)
    mask[order] = np.floor((place + 1) * share + phase) > np.floor(place * share + phase)
    return mask


def _ties(observed: Observations, mask: BoolArray) -> Iterator[IntArray]:
    """Collectives of the same members that the mask keeps too few of to connect their ranks.

    Members that many collectives have in common come first; those that they connect need no more.
    """
    by_members: dict[bytes, list[int]] = {}
    for number, (first, stop) in enumerate(pairwise(observed.first.tolist())):
        by_members.setdefault(np.sort(observed.rank[first:stop]).tobytes(), []).append(number)
    sets = sorted(by_members.items(), key=lambda item: -len(item[1]))
    above = list(range(observed.ranks))

    def root(rank: int) -> int:
        while above[rank] != rank:
            above[rank] = above[above[rank]]
            rank = above[rank]
        return rank

    few: list[tuple[list[int], IntArray]] = []
    for members, collectives in sets:
        ranks = np.frombuffer(members, dtype=observed.rank.dtype).tolist()
        numbers = np.array(collectives, dtype=np.int64)
        if np.count_nonzero(mask[numbers]) < min(FEWEST_TIES, len(numbers)):
            few.append((ranks, numbers))
            continue
        for rank in ranks:
            above[root(rank)] = root(ranks[0])
    for ranks, numbers in few:
        roots = {root(rank) for rank in ranks}
        if len(roots) > 1:
            yield numbers
            for one in roots:
                above[one] = root(ranks[0])


def _bootstrap(
    program: Program, clocks: FloatArray, samples: int, rng: np.random.Generator
) -> FloatArray:
    """(2, R) standard deviations of offsets and drifts over samples with replacement.

    The samples draw steps, or collectives where there are fewer than three steps.
    """
    observed = program.observed
    units = observed.step if len(np.unique(observed.step)) >= 3 else np.arange(observed.collectives)
    names, unit = np.unique(units, return_inverse=True)
    if samples < 2 or len(names) < 2:
        return np.full((2, observed.ranks), np.nan)
    solutions = []
    for _ in range(samples if observed.members < FEW_MEMBERS else max(samples // 4, 2)):
        drawn = rng.integers(len(names), size=len(names))
        counts = np.bincount(drawn, minlength=len(names)).astype(np.float64)
        solutions.append(program.solve(clocks, counts[unit], rounds=1))
    spread: FloatArray = np.std(np.array(solutions), axis=0, ddof=1)
    return spread
