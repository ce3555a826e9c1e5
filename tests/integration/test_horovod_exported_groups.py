"""The code that an export writes for Horovod gives one operation per message of the plan."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from horovod_timelines import operations_of
from short_jobs import small_model

from autotune.strategy_space.builders.collectives import ddp_default
from autotune.strategy_space.horovod_groups import horovod_groups
from autotune.strategy_space.plan import plan

pytest.importorskip("horovod", reason="`make horovod` builds it")
SCRIPT = Path(__file__).parents[1] / "scripts" / "horovod_groups.py"
STEPS = 3


def test_plain_horovod_executes_the_exported_groups_one_by_one(tmp_path: Path) -> None:
    workload = small_model()
    enacted = plan(ddp_default(workload, 64 * 1024, 2 * 1024), workload, 2)
    found = horovod_groups(enacted, workload.variables)
    assert found is not None and len(found.groups) > 1
    sizes = Counter(map(len, found.groups))
    assert len(sizes) > 1
    (tmp_path / "best_horovod.py").write_text(found.script(workload.model, "strategy-1"))
    timeline = tmp_path / "timeline.json"
    horovodrun = [str(Path(sys.executable).with_name("horovodrun")), "-np", "2"]
    recorded = ["env", "HOROVOD_TIMELINE=DYNAMIC", *horovodrun, sys.executable, str(SCRIPT)]
    done = subprocess.run(
        [*recorded, str(tmp_path), str(timeline), str(STEPS)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    operations = operations_of(timeline)
    assert len(operations) == STEPS * len(found.groups)
    assert Counter(map(len, operations)) == {size: STEPS * sizes[size] for size in sizes}
