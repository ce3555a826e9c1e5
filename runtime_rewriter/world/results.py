"""Results of a profile and of a probe, as a world returns them."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.recordings.probe import ProbedLinks, ProbeSeries
from autotune.workload import Workload


@dataclass(frozen=True)
class Profile:
    """One replica's workload, and raw measurements of the links.

    `cores`: CPU cores of rank 0's host. `hosts`: name and number of ranks of every host, in rank
    order. `cross_step_refused`: why the script cannot synchronize across steps, as far as its steps
    show; empty if it can. `current_buckets`: variables of each bucket of the current setup, in its
    order; empty: not known.
    """

    workload: Workload
    series: tuple[ProbeSeries, ...]
    software: dict[str, str]
    cores: int
    cross_step_refused: str
    hosts: tuple[tuple[str, int], ...]
    current_buckets: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Probe:
    """Raw measurements of the links, and the CPU cores of every host in the order of `hosts`."""

    series: tuple[ProbeSeries, ...]
    links: ProbedLinks
    software: dict[str, str]
    cores: tuple[int, ...]
    hosts: tuple[tuple[str, int], ...]
