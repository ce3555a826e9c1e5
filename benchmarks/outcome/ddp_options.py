"""Sweep the options of torch's DDP that are no bucket sizes, each in a start of the script.

A script's DDP has its options for good, so each set has ranks of its own. The script that all sides
of the comparison share then runs with the fastest set. It keeps torch's defaults unless another set
is faster by `GAIN`. Sources of the trials: "options:0:SET:reference".
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
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


def measured_options(
    setup: Setup,
    folder: Path,
    length: TrialLength,
    say: Callable[[str], None],
    on_trial: OnTrial,
    quick: bool = False,
) -> dict[str, object]:
    """Measure what is missing, and return the fastest options. Needs root.

    The first session describes the domain.
    """
    if not (folder / SUMS).exists():
        _measure(setup, folder, DEFAULTS, {}, length, say, on_trial, quick)
    sets = option_sets(read_domain(folder))
    for name, options in sets.items():
        if len(_of_set(read_domain(folder).trials, name)) < REPEATS:
            _measure(setup, folder, name, options, length, say, on_trial, quick)
    times_s = options_s(read_domain(folder).trials)
    chosen = fastest(times_s)
    shown = ", ".join(f"{name} {step_s * 1e3:.1f} ms" for name, step_s in times_s.items())
    say(f"{setup.name}: options of DDP: {shown}; chosen: {chosen}")
    return sets[chosen]


def options_s(trials: Sequence[DatasetTrial]) -> dict[str, float]:
    """Return set -> median step over its trials, in seconds; failures do not count."""
    names = dict.fromkeys(
        trial.source.split(":")[2]
        for of_round in rounds_of(trials, OPTIONS).values()
        for trial in of_round
    )
    times_s = {name: [t.median_s for t in _of_set(trials, name) if t.step_s] for name in names}
    return {name: median(values) for name, values in times_s.items() if values}


def fastest(times_s: Mapping[str, float]) -> str:
    """Return the set for the comparison."""
    best = min(times_s, key=times_s.__getitem__, default=DEFAULTS)
    base_s = times_s.get(DEFAULTS)
    if base_s is not None and times_s[best] > (1 - GAIN) * base_s:
        return DEFAULTS
    return best


def _of_set(trials: Sequence[DatasetTrial], name: str) -> list[DatasetTrial]:
    return [
        trial
        for of_round in rounds_of(trials, OPTIONS).values()
        for trial in of_round
        if trial.source.split(":")[2] == name
    ]


def _measure(
    setup: Setup,
    folder: Path,
    name: str,
    options: Mapping[str, object],
    length: TrialLength,
    say: Callable[[str], None],
    on_trial: OnTrial,
    quick: bool,
) -> None:
    source = f"{OPTIONS}:0:{name}:{REFERENCE}"
    with trial_session(folder, varied(setup, options), length, say, on_trial, quick) as session:
        done = len(_of_set(session.writer.trials, name))
        for _ in range(REPEATS - done):
            session.reference(source)
