"""What a running world found out about its model and its links."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.cluster import CollectiveFit
from autotune.workload import Workload
from runtime_rewriter.probe.link import ProbedLink


@dataclass(frozen=True)
class Profile:
    """What one replica does, what the links cost, the software that runs it, and the CPU cores of rank 0's host.

    `hosts`: name and number of ranks of every host, in rank order. `cross_step_refused`: why the script's synchronization cannot
    cross the step, as its steps so far tell; empty where nothing is known against it.
    """

    workload: Workload
    fits: tuple[CollectiveFit, ...]
    software: dict[str, str]
    cores: int
    cross_step_refused: str
    hosts: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Probe:
    """What the links cost; `links` count hosts as `hosts` does, and `cores` are those of each of them."""

    fits: tuple[CollectiveFit, ...]
    links: tuple[ProbedLink, ...]
    software: dict[str, str]
    cores: tuple[int, ...]
    hosts: tuple[tuple[str, int], ...]
