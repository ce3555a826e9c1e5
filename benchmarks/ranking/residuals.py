"""How far measured steps are from replayed ones, by kind of plan: ln(measured / replayed).

| symbol | meaning |
|---|---|
| n | plans of a kind, each with the median of its trials |
| mean | of their residuals: above 0 the replay is too fast |
| spread | standard deviation of their residuals |
| rms | root of their mean square; noise: the same of the medians' noise, or unknown |
| share | of all plans' squared residuals |

Nothing is learned, so every plan of a domain is judged. Trials of other code are replayed as well:
the replay takes the domain's own probe, profile and costs of the runtime.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autotune.cluster import Cluster
from autotune.strategy_space.plan import Message, Plan
from autotune.strategy_space.strategy import Synchronizer
from benchmarks.ranking.median_noise import median_noise
from benchmarks.ranking.trials import Campaign, plan_times_s

SMALL_BYTES = 64 * 1024
MANY_SMALL = 150
"""Plans with more small messages than this are a kind of their own (GROUNDWORK.md, sec. 8)."""
EVEN = 0.2
"""Hosts whose probed links differ by less, relatively, are even."""
FEWEST = 3
"""Plans of a kind in a domain whose mean is shown."""


@dataclass(frozen=True)
class Residual:
    """One plan of a domain, by its `Plan.enacted_id`.

    `kinds`: groups of kinds -> the plan's kind in that group.
    """

    domain: str
    plan_id: str
    searched: bool
    kinds: dict[str, str]
    messages: int
    measured_s: float
    replayed_s: float
    noise: float

    @property
    def value(self) -> float:
        return math.log(self.measured_s / self.replayed_s)


@dataclass(frozen=True)
class KindFigures:
    """The residuals of one kind; `share` of the squared residuals of all plans."""

    count: int
    mean: float
    spread: float
    rms: float
    noise: float
    share: float


def residuals_of(campaigns: Iterable[Campaign]) -> list[Residual]:
    """Replay every measured plan under its campaign's probe, profile and costs."""
    rows = []
    for campaign in campaigns:
        plans = {plan.enacted_id: plan for _, plan, _ in campaign.measured}
        times_s = plan_times_s(campaign.measured)
        for plan_id, plan in plans.items():
            rows.append(
                Residual(
                    domain=campaign.domain,
                    plan_id=plan_id,
                    searched=plan_id in campaign.searched,
                    kinds=kinds_of(plan, campaign.extractor.cluster),
                    messages=len(plan.messages),
                    measured_s=statistics.median(times_s[plan_id]),
                    replayed_s=campaign.extractor.steps.step_s(plan),
                    noise=median_noise(campaign.noise, len(times_s[plan_id])),
                )
            )
    return rows


def kinds_of(plan: Plan, cluster: Cluster) -> dict[str, str]:
    """Return the plan's kind in each group; the groups overlap."""
    return {
        "synchronizer": f"{_when(plan)}, {_how(plan)}",
        "compression": f"{_when(plan)}, {_compressed(plan)}",
        "small messages": f"{_when(plan)}, {_small(plan)}",
        "in flight": f"{_when(plan)}, {_in_flight(plan)}",
        "owners": f"{_when(plan)}, {_owners(plan)}",
        "hosts": f"{_hosts(cluster)}, {_when(plan)}, {_how(plan)}",
    }


def figures_of(rows: Sequence[Residual], all_rows: Sequence[Residual]) -> KindFigures:
    values = np.array([row.value for row in rows])
    total = sum(row.value**2 for row in all_rows)
    return KindFigures(
        count=len(rows),
        mean=float(values.mean()),
        spread=float(values.std()),
        rms=float(np.sqrt((values**2).mean())),
        noise=math.sqrt(float(np.mean([row.noise**2 for row in rows]))),
        share=float((values**2).sum()) / total if total > 0 else 0.0,
    )


def residual_page(rows: Sequence[Residual]) -> str:
    """Return the tables: all kinds, largest share first in each group, then each by domain."""
    domains = sorted({row.domain for row in rows})
    lines = ["ln(measured / replayed) in percent; above 0 the replay is too fast.\n"]
    lines += [_line("domain", *_HEADS), _line(*["---"] * (1 + len(_HEADS)))]
    lines += [_row(name, [row for row in rows if row.domain == name], rows) for name in domains]
    lines.append(_row("all", rows, rows))
    for group in rows[0].kinds:
        counts = Counter(row.kinds[group] for row in rows)
        of_kind = {kind: [row for row in rows if row.kinds[group] == kind] for kind in counts}
        ordered = sorted(of_kind, key=lambda kind: -sum(row.value**2 for row in of_kind[kind]))
        lines += ["", _line(f"by {group}", *_HEADS), _line(*["---"] * (1 + len(_HEADS)))]
        lines += [_row(kind, of_kind[kind], rows) for kind in ordered]
    lines += ["", f"Mean (spread; plans) of each kind with at least {FEWEST} plans in a domain:"]
    for group in ("synchronizer", "small messages", "in flight"):
        kinds = sorted({row.kinds[group] for row in rows})
        lines += ["", _line(f"by {group}", *domains), _line(*["---"] * (1 + len(domains)))]
        lines += [
            _line(kind, *(_cell(rows, domain, group, kind) for domain in domains)) for kind in kinds
        ]
    return "\n".join(lines) + "\n"


def residual_keys(rows: Sequence[Residual]) -> dict[str, Any]:
    """Return the means over the domains, and each kind's figures by synchronizer."""
    domains = sorted({row.domain for row in rows})
    errors = {
        name: [abs(row.replayed_s / row.measured_s - 1) for row in rows if row.domain == name]
        for name in domains
    }
    rms = {
        name: figures_of([row for row in rows if row.domain == name], rows).rms for name in domains
    }
    return {
        "replay_error_mean": float(np.mean([np.mean(each) for each in errors.values()])),
        "residual_rms": float(np.mean(list(rms.values()))),
        "residual_rms_worst": max(rms.values()),
    }


def write_residuals(path: Path, rows: Iterable[Residual]) -> None:
    """Write one line per plan, the largest residual first."""
    ordered = sorted(rows, key=lambda row: -abs(row.value))
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        groups = list(ordered[0].kinds)
        columns = ("domain", "plan", "searched", "messages", "measured_s", "replayed_s", "residual")
        table.writerow([*columns, *groups])
        for row in ordered:
            cells = (row.domain, row.plan_id, row.searched, row.messages, row.measured_s)
            table.writerow([*cells, row.replayed_s, row.value, *row.kinds.values()])


_HEADS = ("plans", "mean", "spread", "rms", "noise", "share")


def _row(name: str, rows: Sequence[Residual], all_rows: Sequence[Residual]) -> str:
    figures = figures_of(rows, all_rows)
    shares = (figures.spread, figures.rms, figures.noise, figures.share)
    others = ("unknown" if math.isnan(each) else f"{100 * each:.1f}" for each in shares)
    return _line(name, str(figures.count), f"{100 * figures.mean:+.1f}", *others)


def _cell(rows: Sequence[Residual], domain: str, group: str, kind: str) -> str:
    values = [row.value for row in rows if row.domain == domain and row.kinds[group] == kind]
    if len(values) < FEWEST:
        return ""
    return f"{100 * np.mean(values):+.1f} ({100 * np.std(values):.1f}; {len(values)})"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _when(plan: Plan) -> str:
    if plan.results is not None:
        return "half across"
    return "across" if plan.cross_step else "within"


def _how(plan: Plan) -> str:
    names = {_name(message) for message in plan.messages}
    name = names.pop() if len(names) == 1 else "mixed"
    if name == "mixed" and plan.direct:
        name = "mixed with direct"
    ring = " in ring order" if plan.ring_order is not None else ""
    return name + ring


def _name(message: Message) -> str:
    name = message.synchronizer.operation.replace("_", " ")
    return f"hierarchical {name}" if message.hierarchical else name


def _compressed(plan: Plan) -> str:
    names = {message.compressor.value for message in plan.messages} - {"none"}
    return "lossless" if not names else names.pop() if len(names) == 1 else "several compressors"


def _small(plan: Plan) -> str:
    small = sum(message.wire_bytes < SMALL_BYTES for message in plan.messages)
    return f"more than {MANY_SMALL} small" if small > MANY_SMALL else "fewer"


def _in_flight(plan: Plan) -> str:
    if plan.limit is None and not plan.direct:
        return "by the library"
    return "one" if plan.in_flight == 1 else "several"


def _owners(plan: Plan) -> str:
    """Return who owns the sums of direct exchanges and stars."""
    owned = [
        message
        for message in plan.messages
        if message.synchronizer is Synchronizer.DIRECT_EXCHANGE or message.owner is not None
    ]
    if not owned:
        return "no owners"
    owners = {owner for message in owned for owner in _owners_of(message, plan.world_size)}
    alone = all(len(_owners_of(message, plan.world_size)) == 1 for message in owned)
    if len(owners) == 1:
        return "one owner"
    return "several owners, one a message" if alone else "shared messages"


def _owners_of(message: Message, ranks: int) -> tuple[int, ...]:
    if message.owner is not None:
        return (message.owner,)
    if message.shares is None:
        return tuple(range(ranks))
    return tuple(rank for rank, share in enumerate(message.shares) if share > 0)


def _hosts(cluster: Cluster) -> str:
    links = [host.link_bytes_per_s for host in cluster.hosts]
    return "even hosts" if max(links) <= (1 + EVEN) * min(links) else "mixed hosts"
