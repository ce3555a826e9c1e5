"""Sweep the options of torch's DDP that are no bucket sizes, each in a start of the script.

A script's DDP has its options for good, so each set has ranks of its own. The script that all sides
of the comparison share then runs with the fastest set. It keeps torch's defaults unless another set
is faster by `GAIN`. Sources of the trials: "options:0:SET:reference".
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import MappingProxyType

from autotune.dataset.folder import SUMS, read_domain
from autotune.dataset.trials import REFERENCE, DatasetTrial, Domain
from autotune.jobs.campaign.session import OnTrial, TrialLength, trial_session
from autotune.jobs.campaign.setups import Setup, varied
from benchmarks.outcome.kept import OPTIONS, rounds_of

DEFAULTS = "torch's defaults"
ALL = "all of them"
SINGLE: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
        "static_graph": {"static_graph": True},
        "broadcast_buffers=False": {"broadcast_buffers": False},
        "batched_grad_copy": {"batched_grad_copy": True},
    }
)
REPEATS = 3
"""Trials of each set."""
GAIN = 0.005
"""A set must be faster than the defaults by this share, which is above the noise of a start."""


def option_sets(domain: Domain) -> dict[str, dict[str, object]]:
    """Return name -> arguments of `DistributedDataParallel` that this version of torch has.

    Broadcasts of buffers are left out for a model without buffers.
    """
    from torch.nn.parallel import DistributedDataParallel

    known = inspect.signature(DistributedDataParallel.__init__).parameters
    single = {
        name: dict(options)
        for name, options in SINGLE.items()
        if options.keys() <= known.keys()
        and ("broadcast_buffers" not in options or domain.workload.buffers)
    }
    together = {key: value for options in single.values() for key, value in options.items()}
    return {DEFAULTS: {}, **single, ALL: together}


@dataclass(frozen=True)
class SweptOptions:
    """`times_s`: set -> median step. `chosen`: the set for the comparison, and its `options`."""

    times_s: dict[str, float]
    chosen: str
    options: dict[str, object]


def measured_options(
    setup: Setup,
    folder: Path,
    length: TrialLength,
    say: Callable[[str], None],
    on_trial: OnTrial,
    quick: bool = False,
) -> SweptOptions:
    """Measure what is missing, and return the fastest options. Needs root.

    Trials with torch's defaults are references of the domain, which the first session describes.
    The others are in the folder `OPTIONS` of the domain.
    """
    _measure(DEFAULTS, setup, folder, length, say, on_trial, quick)
    sets = option_sets(read_domain(folder))
    times_s = {DEFAULTS: _median_s(folder, DEFAULTS)}
    for name, options in sets.items():
        if name != DEFAULTS:
            apart = folder / OPTIONS
            changed = varied(setup, options)
            _measure(name, changed, apart, length, say, on_trial, quick, like=folder)
            times_s[name] = _median_s(apart, name)
    chosen = fastest(times_s)
    shown = ", ".join(f"{name} {step_s * 1e3:.1f} ms" for name, step_s in times_s.items())
    say(f"{setup.name}: options of DDP: {shown}; chosen: {chosen}")
    return SweptOptions(times_s, chosen, sets[chosen])


def fastest(times_s: Mapping[str, float]) -> str:
    """Return the set for the comparison."""
    best = min(times_s, key=times_s.__getitem__)
    return best if times_s[best] <= (1 - GAIN) * times_s[DEFAULTS] else DEFAULTS


def _trials_of(folder: Path, name: str) -> list[DatasetTrial]:
    trials = read_domain(folder).trials if (folder / SUMS).exists() else ()
    of_rounds = rounds_of(trials, OPTIONS).values()
    return [t for of_round in of_rounds for t in of_round if t.source.split(":")[2] == name]


def _median_s(folder: Path, name: str) -> float:
    """Return the median over the set's trials, infinite if all failed."""
    return median([t.median_s for t in _trials_of(folder, name) if t.step_s] or [math.inf])


def _measure(
    name: str,
    setup: Setup,
    folder: Path,
    length: TrialLength,
    say: Callable[[str], None],
    on_trial: OnTrial,
    quick: bool,
    like: Path | None = None,
) -> None:
    left = REPEATS - len(_trials_of(folder, name))
    if left <= 0:
        return
    with trial_session(folder, setup, length, say, on_trial, quick, like) as session:
        for _ in range(left):
            session.reference(f"{OPTIONS}:0:{name}:{REFERENCE}")
