"""Offsets of all ranks' clocks from the collectives that they took part in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from autotune.arrays import FloatArray
from autotune.errors import InvalidInput
from autotune.profiling.alignment.drift import MOST_DRIFT, machines, matters, middles_s, rough_drift
from autotune.profiling.alignment.intervals import feasible_intervals
from autotune.profiling.alignment.observations import Observations, observe
from autotune.profiling.alignment.result import Alignment
from autotune.profiling.alignment.same_clock import with_shared_clocks
from autotune.profiling.traces.job import TraceJob

if TYPE_CHECKING:
    from autotune.profiling.alignment.program import Drifts, Program

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
    return align_observations(observe(job), samples, seed, job.hosts.assumed)


def align_observations(
    seen: Observations, samples: int = SAMPLES, seed: int = 0, hosts_assumed: bool = False
) -> Alignment:
    """The same for observations that were taken elsewhere; `hosts_assumed`: give the hosts up where the clocks do not bear them out."""
    none = np.zeros(seen.ranks)
    if seen.ranks == 1:
        note = "one rank: nothing to align"
        return Alignment(
            none, none, none, none, np.empty(0), (), (0.0, 0.0), none, none, none, (note,)
        )
    if not seen.collectives:
        raise InvalidInput(
            "clocks are aligned by collectives, but no collective was matched across ranks; see the job's repairs"
        )
    from autotune.profiling.alignment.program import Program, first_guess, noise_of

    guess_s = first_guess(seen)
    hosts_unknown = bool((seen.hosts < 0).any())
    seen, notes = with_shared_clocks(seen, guess_s, noise_of(seen, guess_s).end_s, hosts_assumed)
    used, thinned = _thinned(seen)
    drifts, error = _drifts(used, guess_s)
    used = used.drifted(drifts.rough, drifts.middle_s)
    guess_s = first_guess(used)
    program = Program(used, noise_of(used, guess_s), guess_s, drifts)
    clocks = program.solve(np.stack([guess_s, none]))
    drift = (1 + drifts.rough) * (1 + clocks[1]) - 1
    offset_s, moved = clocks[0], seen.drifted(drift, drifts.middle_s)
    slack_s = moved.violation_s(offset_s)
    slack_s[slack_s < LEAST_SLACK_S] = 0.0
    low_s, high_s = feasible_intervals(moved, slack_s + LEAST_SLACK_S)
    apart = ~np.isfinite(high_s - low_s)
    notes += [*thinned, *_notes(slack_s, apart, drift, hosts_unknown)]
    offset_s = np.where(apart, 0.0, offset_s)
    before, after = (
        float(np.median(seen.end_spread_s(none))),
        float(np.median(moved.end_spread_s(offset_s))),
    )
    spread = _bootstrap(program, clocks, samples, np.random.default_rng(seed))
    drift_spread = np.where(drifts.free, spread[1], error)
    return Alignment(
        offset_s,
        low_s,
        high_s,
        spread[0],
        slack_s,
        seen.transactions,
        (before, after),
        drift,
        drift_spread,
        drifts.middle_s,
        tuple(notes),
    )


def _drifts(seen: Observations, guess_s: FloatArray) -> tuple[Drifts, FloatArray]:
    """Whose clocks drift, by how much about, and the error (R,) of that."""
    from autotune.profiling.alignment.program import LEAST_NOISE_S, Drifts, noise_of

    machine = machines(seen.hosts)
    middle_s = middles_s(seen, machine)
    rough, error = rough_drift(seen, machine, middle_s, guess_s)
    free = matters(seen, rough, error, noise_of(seen, guess_s).end_s, LEAST_NOISE_S)
    return Drifts(
        machine, middle_s, np.where(free, np.clip(rough, -MOST_DRIFT, MOST_DRIFT), 0.0), free
    ), error


def _notes(
    slack_s: FloatArray, apart: np.ndarray, drift: FloatArray, hosts_unknown: bool
) -> list[str]:
    notes = []
    if slack_s.any():
        notes.append(
            f"{int((slack_s > 0).sum())} of {len(slack_s)} collectives break the order of events by up to {slack_s.max() * 1e6:.1f} us"
        )
    if apart.any():
        notes.append(
            f"ranks at places {np.flatnonzero(apart)[:8].tolist()} share no collective with the first; their clocks are as they were"
        )
    if hosts_unknown:
        notes.append(
            "the traces do not tell the hosts, so that clocks of one host are not tied to each other"
        )
    fastest = float(np.abs(drift).max())
    if fastest >= 0.999 * MOST_DRIFT:
        notes.append(
            f"a clock drifts by {fastest * 1e6:.0f} ppm, the most that is allowed for: was it set during the recording?"
        )
    return notes


def _thinned(seen: Observations) -> tuple[Observations, list[str]]:
    """Few enough collectives, of every family and all over the time."""
    if seen.members <= MOST_MEMBERS:
        return seen, []
    keep = max(int(seen.collectives * MOST_MEMBERS / seen.members), 8)
    chosen = np.unique(np.linspace(0, seen.collectives - 1, keep).astype(np.int64))
    return seen.chosen(chosen), [
        f"{len(chosen)} of {seen.collectives} collectives, evenly spaced, used to find the offsets"
    ]


def _bootstrap(
    program: Program, clocks: FloatArray, samples: int, rng: np.random.Generator
) -> FloatArray:
    """(2, R) standard deviations of offsets and drifts over samples of the steps, with replacement.

    Of the collectives where there are fewer than three steps.
    """
    seen = program.seen
    units = seen.step if len(np.unique(seen.step)) >= 3 else np.arange(seen.collectives)
    names, unit = np.unique(units, return_inverse=True)
    if samples < 2 or len(names) < 2:
        return np.full((2, seen.ranks), np.nan)
    found = []
    for _ in range(samples if seen.members < FEW_MEMBERS else max(samples // 4, 2)):
        counts = np.bincount(
            rng.integers(len(names), size=len(names)), minlength=len(names)
        ).astype(np.float64)
        found.append(program.solve(clocks, counts[unit], rounds=1))
    spread: FloatArray = np.std(np.array(found), axis=0, ddof=1)
    return spread
