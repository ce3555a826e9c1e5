"""Offsets of all ranks' clocks from the collectives that they took part in."""

from __future__ import annotations

import numpy as np

from autotune.errors import InvalidInput
from autotune.profiling.alignment.intervals import feasible_intervals
from autotune.profiling.alignment.observations import FloatArray, Observations, observe
from autotune.profiling.alignment.result import Alignment
from autotune.profiling.traces.job import TraceJob

MOST_MEMBERS = 20_000
"""Members of collectives in the convex program; of more, evenly spaced collectives are taken. The intervals always use all."""
SAMPLES = 16
FEW_MEMBERS = 5_000
"""With more, a quarter of the bootstrap samples are taken."""
LEAST_SLACK_S = 2e-8


def align(job: TraceJob, samples: int = SAMPLES, seed: int = 0) -> Alignment:
    """One clock for all ranks of `job`.

    `samples` bootstrap samples give the spread. Raises `InvalidInput` where two or more ranks share no collective at all.
    """
    return align_observations(observe(job), samples, seed)


def align_observations(seen: Observations, samples: int = SAMPLES, seed: int = 0) -> Alignment:
    """The same for observations that were taken elsewhere."""
    none = np.zeros(seen.ranks)
    if seen.ranks == 1:
        return Alignment(none, none, none, none, np.empty(0), (), (0.0, 0.0), ("one rank: nothing to align",))
    if not seen.collectives:
        raise InvalidInput("clocks are aligned by collectives, but no collective was matched across ranks; see the job's repairs")
    from autotune.profiling.alignment.program import Program, first_guess, noise_of

    used, notes = _thinned(seen)
    guess = first_guess(used)
    program = Program(used, noise_of(used, guess), guess)
    offset_s = program.solve(guess)
    slack_s = seen.violation_s(offset_s)
    slack_s[slack_s < LEAST_SLACK_S] = 0.0
    low_s, high_s = feasible_intervals(seen, slack_s + LEAST_SLACK_S)
    if slack_s.any():
        notes.append(
            f"{int((slack_s > 0).sum())} of {seen.collectives} collectives break the order of events by up to {slack_s.max() * 1e6:.1f} us"
        )
    apart = ~np.isfinite(high_s - low_s)
    if apart.any():
        notes.append(
            f"ranks at places {np.flatnonzero(apart)[:8].tolist()} share no collective with the first; their clocks are as they were"
        )
        offset_s = np.where(apart, 0.0, offset_s)
    if (seen.hosts < 0).any():
        notes.append("the traces do not tell the hosts, so that clocks of one host are not tied to each other")
    before, after = (float(np.median(seen.end_spread_s(offsets))) for offsets in (none, offset_s))
    spread_s = _bootstrap(program, offset_s, samples, np.random.default_rng(seed))
    return Alignment(offset_s, low_s, high_s, spread_s, slack_s, seen.transactions, (before, after), tuple(notes))


def _thinned(seen: Observations) -> tuple[Observations, list[str]]:
    """Few enough collectives, of every family and all over the time."""
    if seen.members <= MOST_MEMBERS:
        return seen, []
    keep = max(int(seen.collectives * MOST_MEMBERS / seen.members), 8)
    chosen = np.unique(np.linspace(0, seen.collectives - 1, keep).astype(np.int64))
    return seen.chosen(chosen), [f"{len(chosen)} of {seen.collectives} collectives, evenly spaced, used to find the offsets"]


def _bootstrap(program: object, offset_s: FloatArray, samples: int, rng: np.random.Generator) -> FloatArray:
    """(R,) standard deviation over samples of the steps, with replacement; of the collectives where there are fewer than three steps."""
    from autotune.profiling.alignment.program import Program

    assert isinstance(program, Program)
    seen = program.seen
    units = seen.step if len(np.unique(seen.step)) >= 3 else np.arange(seen.collectives)
    names, unit = np.unique(units, return_inverse=True)
    if samples < 2 or len(names) < 2:
        return np.full(seen.ranks, np.nan)
    found = []
    for _ in range(samples if seen.members < FEW_MEMBERS else max(samples // 4, 2)):
        counts = np.bincount(rng.integers(len(names), size=len(names)), minlength=len(names)).astype(np.float64)
        found.append(program.solve(offset_s, counts[unit], rounds=1))
    spread: FloatArray = np.std(np.array(found), axis=0, ddof=1)
    return spread
