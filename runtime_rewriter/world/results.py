"""Results of a profile, a probe and a training, as a world returns them."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.recordings.probe import ProbedLinks, ProbeSeries
from autotune.strategy_space.op_fusion import OpFusionChoice
from autotune.workload import Workload


@dataclass(frozen=True)
class Profile:
    """One replica's workload, and raw measurements of the links.

    `cores`: CPU cores of rank 0's host. `hosts`: name and number of ranks of every host, in rank
    order. `addresses`: of every host, as Ray knows it; empty: all on this machine.
    `cross_step_refused`: why the script cannot synchronize across steps, as far as its steps show;
    empty if it can. `current_buckets`: variables of each bucket of the current setup, in its
    order; empty: not known. `op_fusions`, `op_fusion_report`: see `ProfileAnswer`. `mirrored`,
    `direct_refused`, `further_models`, `plugins_refused`: see `Profiled`.
    """

    workload: Workload
    series: tuple[ProbeSeries, ...]
    software: dict[str, str]
    cores: int
    cross_step_refused: str
    hosts: tuple[tuple[str, int], ...]
    current_buckets: tuple[tuple[str, ...], ...] = ()
    op_fusions: tuple[OpFusionChoice, ...] = ()
    op_fusion_report: str = ""
    mirrored: bool = False
    direct_refused: str = ""
    further_models: int = 0
    plugins_refused: str = ""
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Probe:
    """Raw measurements of the links, and the CPU cores of every host in the order of `hosts`.

    `hosts` and `addresses` are those of `Profile`.
    """

    series: tuple[ProbeSeries, ...]
    links: ProbedLinks
    software: dict[str, str]
    cores: tuple[int, ...]
    hosts: tuple[tuple[str, int], ...]
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Trained:
    """A training that ended: steps of rank 0, the first exit status that is not 0, and its reason.

    The status is the negative number of a signal that ended the rank.
    """

    steps: int
    exit_status: int = 0
    reason: str = ""


class TrainingEnded(Exception):
    """The script of a kept training came to its own end; it is not started again."""

    def __init__(self, steps: int) -> None:
        super().__init__(f"the script ended by itself after {steps} steps")
        self.steps = steps
