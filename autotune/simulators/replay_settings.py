"""Settings of a job's replays, stored with the simulators that learned from them.

A simulator corrects the replayed time. It must get the time that the same costs and constants give.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from autotune.canonical import canonical_json
from autotune.cluster import Cluster
from autotune.features.extract import Extractor
from autotune.lowering.costs import RuntimeCosts
from autotune.parsing import parse, read_json
from autotune.records import Constants
from autotune.simulators.constants import with_constants
from autotune.strategy_space.op_fusion import OpFusionChoice
from autotune.workload import Workload

_FILE = "replay_settings.json"


@dataclass(frozen=True)
class ReplaySettings:
    """`costs`: the stated ones of the runtime; None: those of the workload's device.

    `constants`: what the job's trials corrected. `op_fusions`: the measured sets of ops.
    """

    __pydantic_config__ = {"extra": "forbid"}

    costs: RuntimeCosts | None = None
    constants: Constants = field(default_factory=Constants)
    op_fusions: tuple[OpFusionChoice, ...] = ()

    def extractor(self, workload: Workload, cluster: Cluster) -> Extractor:
        """The extractor of the job's features, for a cluster as it was probed or stated."""
        stated = Extractor(workload, cluster, self.costs, self.op_fusions)
        return with_constants(stated, self.constants)

    def save(self, folder: Path) -> None:
        (folder / _FILE).write_text(canonical_json(self), encoding="utf-8")

    @staticmethod
    def load(folder: Path) -> ReplaySettings:
        """Those of a saved simulator. An earlier version saved none. Raises `InvalidInput`."""
        file = folder / _FILE
        return (
            parse(ReplaySettings, read_json(file), str(file)) if file.exists() else ReplaySettings()
        )
