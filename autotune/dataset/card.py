"""The card of a domain: its trials, their conditions, dates and noise, and the licence."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from autotune.canonical import to_data
from autotune.cluster import MAX_ERROR
from autotune.dataset.noise import reference_noise, repeat_noise
from autotune.dataset.trials import Domain
from autotune.errors import InvalidInput
from autotune.limits import MAX_COUNT, check_range, check_seconds
from autotune.parsing import parse, refuse_newer
from autotune.records import Accelerators, Failed

LICENCE = "CC-BY-4.0"
SCHEMA = 1


@dataclass(frozen=True)
class Card:
    """Times are ISO, UTC. Noise is a relative standard deviation, None with too few trials.

    `reference_noise`: of the medians of neighbouring references. `repeat_noise`: of the steady
    medians of one plan.
    """

    __pydantic_config__ = {"extra": "forbid"}

    name: str
    model: str
    cluster: str
    conditions: str
    first: str
    last: str
    candidates: int
    strategies: int
    failed: dict[str, int]
    references: int
    disturbed: int
    sessions: int
    sources: dict[str, int]
    timed_steps: tuple[int, int]
    fastest_s: float | None
    slowest_s: float | None
    reference_s: float | None
    reference_noise: float | None
    repeat_noise: float | None
    licence: str = LICENCE
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        counts = ("candidates", "strategies", "references", "disturbed", "sessions")
        for what in counts:
            check_range(getattr(self, what), 0, MAX_COUNT, f"{what} of the card of {self.name!r}")
        for what in ("fastest_s", "slowest_s", "reference_s"):
            check_seconds(getattr(self, what), f"{what} of the card of {self.name!r}")
        for noise in (self.reference_noise, self.repeat_noise):
            check_range(noise or 0.0, 0, MAX_ERROR, f"noise on the card of {self.name!r}")
        for count in (*self.failed.values(), *self.sources.values(), *self.timed_steps):
            check_range(count, 0, MAX_COUNT, f"counts on the card of {self.name!r}")

    @staticmethod
    def from_data(data: Any, where: str) -> Card:
        refuse_newer(data, SCHEMA, "card", where)
        return parse(Card, data, where)

    def check(self, domain: Domain, where: str) -> None:
        """Raise `InvalidInput` if the card is of another domain, or counts other trials."""
        true: dict[str, object] = {
            "name": domain.name,
            "model": domain.model,
            "cluster": domain.cluster_name,
            "candidates": len(domain.candidates),
            "references": len(domain.references),
            "sessions": len(domain.sessions),
        }
        for what, value in true.items():
            if getattr(self, what) != value:
                raise InvalidInput(
                    f"{where}: {what} must be {value!r}, as the domain's files have it, but is "
                    f"{getattr(self, what)!r}; fetch the whole folder again"
                )


def card_of(domain: Domain) -> Card:
    measured = [trial.median_s for trial in domain.candidates if trial.step_s]
    references = [trial.median_s for trial in domain.references if trial.step_s]
    steps = [len(trial.step_s) for trial in domain.trials if trial.step_s]
    times = [trial.time_s for trial in domain.trials]
    strategies = {trial.strategy.id for trial in domain.candidates if trial.strategy is not None}
    outcomes = [trial.outcome for trial in domain.trials]
    failures = [outcome.kind.value for outcome in outcomes if isinstance(outcome, Failed)]
    return Card(
        name=domain.name,
        model=domain.model,
        cluster=domain.cluster_name,
        conditions=domain.environment.conditions.label,
        first=_iso(min(times)) if times else "",
        last=_iso(max(times)) if times else "",
        candidates=len(domain.candidates),
        strategies=len(strategies),
        failed=_counts(failures),
        references=len(domain.references),
        disturbed=sum(trial.disturbed for trial in domain.trials),
        sessions=len(domain.sessions),
        sources=_counts([trial.kind for trial in domain.trials]),
        timed_steps=(min(steps), max(steps)) if steps else (0, 0),
        fastest_s=min(measured, default=None),
        slowest_s=max(measured, default=None),
        reference_s=float(np.median(references)) if references else None,
        reference_noise=reference_noise(domain),
        repeat_noise=repeat_noise(domain),
    )


def card_text(domain: Domain) -> str:
    """The card for people, in Markdown."""
    card, environment = card_of(domain), domain.environment
    real = environment.conditions.accelerators is Accelerators.REAL
    measured = domain.workload.source == "measured"
    times = "what one replica alone takes" if measured else "times that are assumed"
    computing = f"accelerators are emulated: computation is timed waits of {times}"
    if real:
        computing = "computation is real"
    failed = ", ".join(f"{count} {kind}" for kind, count in card.failed.items()) or "none"
    software = ", ".join(
        f"{name} {version}" for name, version in sorted(environment.software.items())
    )
    references = f"{card.references} references (the script's own DDP)"
    spread = f"{_ms(card.fastest_s)} to {_ms(card.slowest_s)}"
    noise = f"references {_share(card.reference_noise)}"
    machine = f"{environment.cores} cores, {environment.machine}, Linux {environment.kernel}"
    rows = {
        "Trials": f"{card.candidates} of {card.strategies} strategies, and {references}",
        "Where from": ", ".join(f"{count} {name}" for name, count in card.sources.items()),
        "Failed": failed,
        "Disturbed": f"{card.disturbed}, marked and kept",
        "Median step": f"{spread}; references {_ms(card.reference_s)}",
        "Noise of a median": f"{noise}, repeated plans {_share(card.repeat_noise)}",
        "Timed steps a trial": f"{card.timed_steps[0]} to {card.timed_steps[1]}",
        "When (UTC)": f"{card.first} to {card.last}, {card.sessions} sessions",
        "Machine": machine,
        "Software": software,
        "Licence": f"{LICENCE} (the scripts: Apache-2.0)",
    }
    workload, cluster = domain.workload, domain.cluster
    what = (
        f"Step times of {card.model} ({len(workload.variables)} gradient variables, "
        f"{workload.grad_bytes / 1e6:.1f} MB) on {card.cluster}: {cluster.world_size} workers on "
        f"{len(cluster.hosts)} hosts."
    )
    how = (
        f"Conditions: {card.conditions or 'a real cluster'}. Emulated hosts are network namespaces "
        "of one machine with shaped links; parameters, gradients and transfers are real; "
        f"{computing}. A trial's time is that of its slowest rank, step by step."
    )
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return f"# {card.name}\n\n{what}\n\n{how}\n\n| | |\n|---|---|\n{table}\n"


def card_data(domain: Domain) -> dict[str, object]:
    data: dict[str, object] = to_data(card_of(domain))
    return data


def _counts(values: list[str]) -> dict[str, int]:
    return {value: values.count(value) for value in sorted(set(values))}


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _ms(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds * 1e3:.1f} ms"


def _share(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2%}"
